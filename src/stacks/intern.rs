//! From raw frames to a stack ID, for all threads: a sharded table of raw stacks before the tree of named
//! ones.
//!
//! Must not know how frames are captured or named; a function for naming is handed in. Invariant: no
//! lock is held while a name is asked for, because the answer may need the GIL and another thread may
//! hold the GIL and want the lock.
#![deny(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use hashbrown::{HashMap, HashTable};
use parking_lot::{Mutex, RwLock};

use super::raw::{RawFrame, same};
use super::tree::{FrameId, Place, Tree};

/// Says that the tree is full; no stack has this number.
pub const OVERFLOW: u32 = u32::MAX;
pub const DEFAULT_MAX_STACKS: usize = 65_536;

const SHARDS: usize = 16;

struct Known {
    hash: u64,
    id: u32,
    frames: Arc<[RawFrame]>,
}

/// A frame's name, as far as it is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Name {
    Python {
        file: String,
        function: String,
        line: u32,
    },
    Native {
        address: u64,
    },
    Cut,
    /// The frame is not to be shown.
    Hidden,
}

/// Everything behind the tree's lock. A raw frame's name is remembered, so that a new stack of old
/// frames copies no string.
struct Named {
    tree: Tree,
    frames: Option<HashMap<RawFrame, Option<FrameId>, foldhash::fast::FixedState>>,
}

/// The table. One for the process; tests make their own.
pub struct Interner {
    shards: [RwLock<HashTable<Known>>; SHARDS],
    named: Mutex<Named>,
    max_raw: AtomicUsize,
    first_sights: AtomicU64,
    refused: AtomicU64,
    forgotten: AtomicU64,
}

/// Figures of the table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    pub stacks: usize,
    pub nodes: usize,
    pub frames: usize,
    pub bytes: usize,
    pub first_sights: u64,
    pub refused: u64,
    pub forgotten: u64,
}

impl Interner {
    pub const fn new(max_stacks: usize) -> Interner {
        Interner {
            shards: [const { RwLock::new(HashTable::new()) }; SHARDS],
            named: Mutex::new(Named { tree: Tree::new(max_stacks), frames: None }),
            max_raw: AtomicUsize::new(max_stacks * 2),
            first_sights: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            forgotten: AtomicU64::new(0),
        }
    }

    pub fn set_max_stacks(&self, max_stacks: usize) {
        self.named.lock().tree.set_max_stacks(max_stacks);
        self.max_raw.store(max_stacks * 2, Ordering::Relaxed);
    }

    fn shard(&self, hash: u64) -> &RwLock<HashTable<Known>> {
        &self.shards[(hash >> 32) as usize % SHARDS]
    }

    /// The ID of these raw frames (innermost first), and the frames as they are stored.
    pub fn intern(
        &self,
        hash: u64,
        frames: &[RawFrame],
        name: impl Fn(RawFrame) -> Name,
    ) -> (u32, Arc<[RawFrame]>) {
        let equal = |known: &Known| known.hash == hash && same(&known.frames, frames);
        if let Some(known) = self.shard(hash).read().find(hash, equal) {
            return (known.id, known.frames.clone());
        }
        self.first_sights.fetch_add(1, Ordering::Relaxed);
        let id = self.first_sight(frames, name);
        let frames: Arc<[RawFrame]> = frames.into();
        let mut shard = self.shard(hash).write();
        // Another thread may have been first: its ID is the same, because the tree gave both.
        if shard.find(hash, |known| known.hash == hash && same(&known.frames, &frames)).is_none() {
            if shard.len() >= self.max_raw.load(Ordering::Relaxed).div_ceil(SHARDS) {
                // Code that is made anew all the time has raw stacks without end, but few named ones.
                self.forgotten.fetch_add(shard.len() as u64, Ordering::Relaxed);
                shard.clear();
            }
            let known = Known { hash, id, frames: frames.clone() };
            shard.insert_unique(hash, known, |known| known.hash);
        }
        (id, frames)
    }

    #[cold]
    fn first_sight(&self, frames: &[RawFrame], name: impl Fn(RawFrame) -> Name) -> u32 {
        let known: Vec<_> = {
            let named = self.named.lock();
            frames.iter().map(|frame| named.frames.as_ref()?.get(frame).copied()).collect()
        };
        let names: Vec<_> = frames
            .iter()
            .zip(&known)
            .map(|(frame, known)| if known.is_some() { None } else { Some(name(*frame)) })
            .collect();

        let mut named = self.named.lock();
        let Named { tree, frames: by_raw } = &mut *named;
        let full = tree.is_full();
        let by_raw = by_raw.get_or_insert_default();
        if by_raw.len() > self.max_raw.load(Ordering::Relaxed) {
            by_raw.clear();
        }
        let mut ids = Vec::with_capacity(frames.len());
        for ((frame, known), name) in frames.iter().zip(known).zip(names) {
            let id = match (known, name) {
                (Some(id), _) => id,
                // A full tree takes no new frames, and so no new stack of which this one is part.
                (None, Some(name)) if !full || name == Name::Hidden => {
                    let id = match name {
                        Name::Python { file, function, line } => {
                            Some(tree.python_frame(&file, &function, line))
                        }
                        Name::Native { address } => Some(tree.frame(Place::Native { address })),
                        Name::Cut => Some(tree.frame(Place::Cut)),
                        Name::Hidden => None,
                    };
                    by_raw.insert(*frame, id);
                    id
                }
                _ => return self.refuse(),
            };
            ids.extend(id);
        }
        tree.insert(ids.into_iter().rev()).unwrap_or_else(|| self.refuse())
    }

    fn refuse(&self) -> u32 {
        self.refused.fetch_add(1, Ordering::Relaxed);
        OVERFLOW
    }

    /// Whether nobody holds the names for longer than `patience`.
    pub fn answers(&self, patience: std::time::Duration) -> bool {
        self.named.try_lock_for(patience).is_some()
    }

    /// The frames of a stack, innermost first.
    pub fn stack(&self, id: u32) -> Vec<Place> {
        self.named.lock().tree.stack(id)
    }

    pub fn figures(&self) -> Figures {
        let raw: usize = self
            .shards
            .iter()
            .map(|shard| {
                let shard = shard.read();
                let frames: usize =
                    shard.iter().map(|known| known.frames.len() * size_of::<RawFrame>()).sum();
                frames + shard.capacity() * (size_of::<Known>() + 1)
            })
            .sum();
        let named = self.named.lock();
        let by_raw = named.frames.as_ref().map_or(0, |frames| frames.capacity() * 25);
        Figures {
            stacks: named.tree.stacks(),
            nodes: named.tree.nodes(),
            frames: named.tree.frames(),
            bytes: named.tree.bytes() + by_raw + raw,
            first_sights: self.first_sights.load(Ordering::Relaxed),
            refused: self.refused.load(Ordering::Relaxed),
            forgotten: self.forgotten.load(Ordering::Relaxed),
        }
    }
}

impl std::hash::Hash for RawFrame {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        state.write_u64(self.mix());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stacks::raw::hash;

    fn named(frame: RawFrame) -> Name {
        match frame.place {
            0 => Name::Hidden,
            place => Name::Python { file: "a.py".into(), function: "f".into(), line: place as u32 / 100 },
        }
    }

    fn intern(interner: &Interner, places: &[u64]) -> u32 {
        let frames: Vec<_> = places.iter().map(|place| RawFrame::python(*place, 0, 0)).collect();
        interner.intern(hash(&frames), &frames, named).0
    }

    #[test]
    fn raw_stacks_that_read_the_same_are_one() {
        let interner = Interner::new(10);
        let a = intern(&interner, &[100, 200]);
        assert_eq!(intern(&interner, &[100, 200]), a);
        assert_eq!(intern(&interner, &[101, 200]), a);
        assert_eq!(intern(&interner, &[101, 0, 202]), a);
        assert_ne!(intern(&interner, &[200, 100]), a);
        assert_eq!(interner.figures().stacks, 2);
        assert_eq!(interner.figures().first_sights, 4);
        assert_eq!(interner.stack(a).len(), 2);
    }

    #[test]
    fn beyond_the_bound_new_stacks_overflow_and_are_counted() {
        let interner = Interner::new(2);
        let ids: Vec<_> = (1..=2).map(|i| intern(&interner, &[i * 100])).collect();
        assert_eq!(intern(&interner, &[900]), OVERFLOW);
        assert_eq!(intern(&interner, &[100]), ids[0]);
        assert_eq!(interner.figures().refused, 1);
        assert!(interner.stack(OVERFLOW).is_empty());
    }

    #[test]
    fn endless_raw_stacks_take_bounded_memory() {
        let interner = Interner::new(16);
        for i in 0..10_000u64 {
            // Ever new code addresses, the same lines.
            let frames = [RawFrame::python(0x1000 * (i + 1), 0, 0)];
            let name = |_| Name::Python { file: "x".into(), function: "f".into(), line: 1 };
            assert_eq!(interner.intern(hash(&frames), &frames, name).0, 1);
        }
        let figures = interner.figures();
        assert!(figures.forgotten > 9_000 && figures.bytes < 20_000, "{figures:?}");
    }

    #[test]
    fn threads_agree() {
        let interner = Interner::new(10_000);
        let work = || (1..500).map(|i| intern(&interner, &[i * 100, i * 300])).collect::<Vec<_>>();
        let all: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(work)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(all.iter().all(|ids| *ids == all[0]));
        assert_eq!(interner.figures().stacks, 499);
    }
}
