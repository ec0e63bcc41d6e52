//! The model of a recorded run, whatever file it came from.
//!
//! Must not know: file formats, allocators, judgement.
//! Invariant: stack 0 has no frames; every event's stream and stack are numbers of this recording's tables.

use hashbrown::HashTable;
use serde::Serialize;
use std::hash::{BuildHasher, Hash};

/// What an event says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Action {
    /// A block was handed out; the size is what was requested.
    Alloc = 0,
    /// The block was given back by its user.
    FreeRequested = 1,
    /// The block became reusable: no stream works on it any more.
    FreeCompleted = 2,
    SegmentAlloc = 3,
    SegmentFree = 4,
    SegmentMap = 5,
    SegmentUnmap = 6,
    /// A snapshot was taken; the size is the active bytes.
    Snapshot = 7,
    /// Out of memory; the size is what could not be had, the address field holds the device's free bytes.
    OutOfMemory = 8,
}

/// Every action with its name in a snapshot, in the order of its number.
pub const ACTIONS: [(Action, &str); 9] = [
    (Action::Alloc, "alloc"),
    (Action::FreeRequested, "free_requested"),
    (Action::FreeCompleted, "free_completed"),
    (Action::SegmentAlloc, "segment_alloc"),
    (Action::SegmentFree, "segment_free"),
    (Action::SegmentMap, "segment_map"),
    (Action::SegmentUnmap, "segment_unmap"),
    (Action::Snapshot, "snapshot"),
    (Action::OutOfMemory, "oom"),
];

/// No block and no segment is larger than this, in bytes.
pub const MOST: u64 = 1 << 46;

/// One entry of a device's history: 32 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// Microseconds; 0 in histories that tell no time.
    pub time_us: u64,
    pub address: u64,
    pub size: u64,
    /// A number in [`Recording::stacks`].
    pub stack: u32,
    /// A number in [`Recording::streams`].
    pub stream: u16,
    pub action: Action,
}

/// A block of a segment as it was when the snapshot was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    pub address: u64,
    pub size: u64,
    pub requested: u64,
    pub stack: u32,
    pub state: BlockState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockState {
    Allocated,
    /// Given back, but a stream may still work on it.
    PendingFree,
    Inactive,
}

/// A segment as it was when the snapshot was taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    pub address: u64,
    pub size: u64,
    pub stream: u64,
    pub expandable: bool,
    pub blocks: Vec<Block>,
}

/// One device of the run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Device {
    pub index: i32,
    pub events: Vec<Event>,
    /// Sorted by address; empty where the recording does not tell.
    pub segments: Vec<Segment>,
}

/// A begin or an end that the program marked (`record_function`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Annotation {
    /// A number in the recording's names ([`Stacks::name`]).
    pub name: u32,
    pub begins: bool,
    pub time_us: u64,
}

/// The recording allocator's settings, as far as they decide how it splits blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Settings {
    /// `PYTORCH_CUDA_ALLOC_CONF` as it was set.
    pub conf: String,
    pub expandable_segments: bool,
    pub max_split_size: Option<u64>,
    /// (power of two in MiB, divisions), ascending.
    pub roundup_power2_divisions: Vec<(u64, u64)>,
}

/// What kind of file the recording came from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Form {
    #[default]
    Snapshot,
    /// A list of segments and nothing else (`torch.cuda.memory_snapshot()`).
    Segments,
    /// strandline's own trace.
    Trace,
}

/// A recorded run.
#[derive(Clone, Debug, Default)]
pub struct Recording {
    pub form: Form,
    pub devices: Vec<Device>,
    pub streams: Vec<u64>,
    pub stacks: Stacks,
    pub annotations: Vec<Annotation>,
    pub settings: Settings,
    /// What the reader wants said about the file.
    pub notes: Vec<String>,
}

impl Recording {
    /// How many events the run has on all devices.
    pub fn events(&self) -> usize {
        self.devices.iter().map(|device| device.events.len()).sum()
    }
}

/// One frame of a recorded stack, innermost first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameRef<'a> {
    pub function: &'a str,
    pub file: &'a str,
    pub line: u32,
}

/// Call stacks, frames and names, each kept once.
#[derive(Clone, Debug)]
pub struct Stacks {
    names: Table<Box<str>>,
    frames: Table<(u32, u32, u32)>,
    stacks: Table<Box<[u32]>>,
}

impl Default for Stacks {
    fn default() -> Stacks {
        let mut stacks =
            Stacks { names: Table::default(), frames: Table::default(), stacks: Table::default() };
        stacks.intern_stack(&[]);
        stacks
    }
}

impl Stacks {
    /// The number of a name.
    pub fn intern_name(&mut self, name: &str) -> u32 {
        self.names.intern(name, |known| &**known, || name.into())
    }

    /// The number of a frame (names by number).
    pub fn intern_frame(&mut self, function: u32, file: u32, line: u32) -> u32 {
        let frame = (function, file, line);
        self.frames.intern(&frame, |known| known, || frame)
    }

    /// The number of a stack (frames by number, innermost first); 0 for no frames.
    pub fn intern_stack(&mut self, frames: &[u32]) -> u32 {
        self.stacks.intern(frames, |known| &**known, || frames.into())
    }

    pub fn name(&self, name: u32) -> &str {
        self.names.items.get(name as usize).map_or("", |name| name)
    }

    /// How many names, frames and stacks there are.
    pub fn counts(&self) -> (u32, u32, u32) {
        (self.names.items.len() as u32, self.frames.items.len() as u32, self.stacks.items.len() as u32)
    }

    /// A frame's function, file (names by number) and line.
    pub fn frame(&self, frame: u32) -> Option<(u32, u32, u32)> {
        self.frames.items.get(frame as usize).copied()
    }

    /// A stack's frames by number, innermost first.
    pub fn stack(&self, stack: u32) -> &[u32] {
        self.stacks.items.get(stack as usize).map_or(&[], |frames| frames)
    }

    /// A stack's frames, innermost first.
    pub fn frames(&self, stack: u32) -> impl Iterator<Item = FrameRef<'_>> {
        self.stack(stack).iter().filter_map(|frame| {
            let (function, file, line) = self.frame(*frame)?;
            Some(FrameRef { function: self.name(function), file: self.name(file), line })
        })
    }
}

/// Things numbered in the order of their first appearance.
#[derive(Clone, Debug)]
struct Table<T> {
    items: Vec<T>,
    index: HashTable<u32>,
    hasher: foldhash::fast::FixedState,
}

impl<T> Default for Table<T> {
    fn default() -> Table<T> {
        Table { items: Vec::new(), index: HashTable::new(), hasher: foldhash::fast::FixedState::default() }
    }
}

impl<T> Table<T> {
    fn intern<K>(&mut self, key: &K, view: impl Fn(&T) -> &K, make: impl FnOnce() -> T) -> u32
    where
        K: Hash + Eq + ?Sized,
    {
        let hash = self.hasher.hash_one(key);
        let items = &self.items;
        if let Some(known) = self.index.find(hash, |known| view(&items[*known as usize]) == key) {
            return *known;
        }
        let number = self.items.len() as u32;
        self.items.push(make());
        let (items, hasher) = (&self.items, &self.hasher);
        self.index.insert_unique(hash, number, |known| hasher.hash_one(view(&items[*known as usize])));
        number
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stacks_are_kept_once() {
        let mut stacks = Stacks::default();
        assert_eq!(stacks.intern_stack(&[]), 0);
        let (step, file) = (stacks.intern_name("step"), stacks.intern_name("t.py"));
        let frame = stacks.intern_frame(step, file, 7);
        let stack = stacks.intern_stack(&[frame, frame]);
        assert_eq!(stacks.intern_frame(step, file, 7), frame);
        assert_eq!(stacks.intern_stack(&[frame, frame]), stack);
        assert_ne!(stacks.intern_stack(&[frame]), stack);
        let frames: Vec<_> = stacks.frames(stack).collect();
        assert_eq!(frames, [FrameRef { function: "step", file: "t.py", line: 7 }; 2]);
        assert_eq!(size_of::<Event>(), 32);
    }
}
