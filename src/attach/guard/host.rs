//! Guard mode over host memory: this process writes the patterns and looks at them itself.
//!
//! Invariant: memory held back is bounded ([`HELD_BYTES`], [`HELD_BLOCKS`]).

use super::{Block, Changed, Faults, PATTERN, POISON, Wrong};
use crate::attach::gpu;
use crate::attach::process::{HOST, State};
use crate::attach::served::Served;
use crate::driver::host::HostDriver;
use crate::driver::{Address, Stream};
use crate::heap::{BlockInfo, BlockState, HeapError};
use crate::stacks::StackId;
use parking_lot::Mutex;
use std::collections::{HashSet, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Bytes of pattern behind each block.
pub const REAR: u64 = 64;
/// Freed memory that is held back, at most.
const HELD_BYTES: u64 = 256 << 20;
const HELD_BLOCKS: usize = 1 << 16;

/// The guard of the host's memory.
#[derive(Debug, Default)]
pub struct Guard {
    held: Mutex<VecDeque<Block>>,
    held_bytes: AtomicU64,
    pub faults: Faults,
}

/// What of a range is not `byte`; offsets are counted from `origin`.
fn changed(origin: Address, at: Address, size: u64, byte: u8) -> Option<Changed> {
    // SAFETY: a range of a block of ours that is handed out to us or to the caller of free: mapped memory.
    let bytes = unsafe { std::slice::from_raw_parts(at as *const u8, size as usize) };
    let first = bytes.iter().position(|b| *b != byte)?;
    let count = bytes[first..].iter().filter(|b| **b != byte).count() as u64;
    Some(Changed { first: (at - origin) as i64 + first as i64, count })
}

fn fill(at: Address, size: u64, byte: u8) {
    // SAFETY: as for `changed`; nobody else may touch the range now.
    unsafe { (at as *mut u8).write_bytes(byte, size as usize) };
}

impl Guard {
    /// Hands out a block with a pattern behind it.
    ///
    /// # Errors
    /// The heap's.
    pub fn malloc(
        &self,
        state: &State,
        host: &Served<HostDriver>,
        size: u64,
        stream: Stream,
        stack: StackId,
    ) -> Result<Address, HeapError> {
        let at = host.malloc_within(size, (0, REAR), stream, stack, state.clock)?;
        fill(at + size, REAR, PATTERN);
        Ok(at)
    }

    /// Takes a block back: looks at its pattern, poisons it, and holds it back.
    ///
    /// # Errors
    /// [`HeapError::NotOurs`] if no block that is handed out starts at `at`.
    pub fn free(&self, state: &State, host: &Served<HostDriver>, at: Address) -> Result<(), HeapError> {
        let now = gpu::stack();
        let twice = self.held.lock().iter().rev().find(|held| held.at == at).copied();
        if let Some(held) = twice {
            self.faults.add(HOST, Wrong::FreedTwice, held, Changed::default(), now);
            return Ok(());
        }
        let (held, stream) = {
            let books = host.lock();
            let block = live(books.heap.block_at(at), at)?;
            let held =
                Block { at, size: block.requested - REAR, born: books.stack_of(block.tag), freed: now.0 };
            (held, block.stream)
        };
        host.retire(at, at, held.size, stream, state.clock)?;
        if let Some(found) = changed(at, at + held.size, REAR, PATTERN) {
            self.faults.add(HOST, Wrong::Overflow, held, found, StackId::NONE);
        }
        fill(at, held.size, POISON);
        self.hold(host, held)
    }

    fn hold(&self, host: &Served<HostDriver>, held: Block) -> Result<(), HeapError> {
        let mut leaving = Vec::new();
        {
            let mut all = self.held.lock();
            all.push_back(held);
            let mut bytes = self.held_bytes.fetch_add(held.size, Ordering::Relaxed) + held.size;
            while bytes > HELD_BYTES || all.len() > HELD_BLOCKS {
                let Some(oldest) = all.pop_front() else { break };
                bytes = self.held_bytes.fetch_sub(oldest.size, Ordering::Relaxed) - oldest.size;
                leaving.push(oldest);
            }
        }
        for held in leaving {
            self.look_at_poison(held);
            host.lock().heap.free(held.at)?;
        }
        Ok(())
    }

    fn look_at_poison(&self, held: Block) {
        if let Some(found) = changed(held.at, held.at, held.size, POISON) {
            self.faults.add(HOST, Wrong::UseAfterFree, held, found, StackId::NONE);
        }
    }

    /// Whether nobody holds the guard's own locks for longer than `patience`.
    pub fn answers(&self, patience: Duration) -> bool {
        self.held.try_lock_for(patience).is_some() && self.faults.answers(patience)
    }

    /// At the end of the run: what is still held back, and what is still live.
    pub fn look_at_all(&self, host: &Served<HostDriver>) {
        let held: Vec<Block> = self.held.lock().iter().copied().collect();
        let known: HashSet<Address> = held.iter().map(|held| held.at).collect();
        held.into_iter().for_each(|held| self.look_at_poison(held));
        let mut live = Vec::new();
        if let Some(books) = host.books() {
            books.heap.for_each_live(|block| {
                if block.state == BlockState::Allocated && !known.contains(&block.address) {
                    live.push((block.address, block.requested, block.tag));
                }
            });
            let stacks: Vec<u32> = live.iter().map(|(_, _, tag)| books.stack_of(*tag)).collect();
            // Under the lock: none of these is freed meanwhile.
            for ((at, whole, _), born) in live.into_iter().zip(stacks) {
                let size = whole.saturating_sub(REAR);
                if let Some(found) = changed(at, at + size, REAR, PATTERN) {
                    let held = Block { at, size, born, freed: 0 };
                    self.faults.add(HOST, Wrong::Overflow, held, found, StackId::NONE);
                }
            }
        }
    }
}

/// The block, if it is handed out and starts there.
fn live(found: Option<BlockInfo>, at: Address) -> Result<BlockInfo, HeapError> {
    found
        .filter(|block| {
            block.address == at && block.state == BlockState::Allocated && block.requested >= REAR
        })
        .ok_or(HeapError::NotOurs { address: at })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_changed_is_counted_from_the_first() {
        let mut bytes = vec![PATTERN; 64];
        let at = |bytes: &[u8]| bytes.as_ptr() as u64;
        assert_eq!(changed(at(&bytes) - 100, at(&bytes), 64, PATTERN), None);
        bytes[3] = 0;
        bytes[9] = 1;
        let found = changed(at(&bytes) - 100, at(&bytes), 64, PATTERN);
        assert_eq!(found, Some(Changed { first: 103, count: 2 }));
        fill(bytes.as_mut_ptr() as u64, 64, POISON);
        assert_eq!(changed(at(&bytes), at(&bytes), 64, POISON), None);
        assert!(f32::from_ne_bytes([POISON; 4]).is_nan() && f64::from_ne_bytes([POISON; 8]).is_nan());
    }
}
