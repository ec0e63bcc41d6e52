//! Past events of one device, kept on request for torch's snapshots (`_record_memory_history`).
//!
//! Must not know: torch's forms, stacks' words. Invariants: a block that waits for other streams is
//! completed before its address is seen again; memory is bounded by what was asked for and by [`MOST`].

use crate::driver::journal::{Change, Entry};
use crate::driver::{Address, Stream};
use crate::stacks::StackId;
use std::collections::{HashMap, VecDeque};
use std::time::{SystemTime, UNIX_EPOCH};

/// Events kept at most, whatever was asked for (some 400 MB).
pub const MOST: usize = 8 << 20;

/// When an event remembers the call stack (torch's `context`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Context {
    /// Never.
    #[default]
    Never,
    /// For live blocks only, which strandline always does.
    State,
    /// Allocations.
    Alloc,
    /// Frees and segments, too.
    All,
}

/// What is to be recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wish {
    pub enabled: bool,
    pub context: Context,
    /// Whether stacks have native frames, too.
    pub native: bool,
    /// Events kept, the newest ones.
    pub entries: usize,
    /// Whether what was recorded so far is forgotten.
    pub clear: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    Alloc,
    FreeRequested,
    FreeCompleted,
    SegmentAlloc,
    SegmentFree,
    SegmentMap,
    SegmentUnmap,
    OutOfMemory,
}

impl Action {
    /// Torch's word for it.
    pub fn name(self) -> &'static str {
        match self {
            Action::Alloc => "alloc",
            Action::FreeRequested => "free_requested",
            Action::FreeCompleted => "free_completed",
            Action::SegmentAlloc => "segment_alloc",
            Action::SegmentFree => "segment_free",
            Action::SegmentMap => "segment_map",
            Action::SegmentUnmap => "segment_unmap",
            Action::OutOfMemory => "oom",
        }
    }
}

/// One event. Bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    pub action: Action,
    /// For [`Action::OutOfMemory`]: the device's free bytes.
    pub at: Address,
    pub size: u64,
    pub stream: Stream,
    /// Microseconds since 1970.
    pub time_us: u64,
    pub stack: StackId,
}

/// The newest events of a device.
#[derive(Debug, Default)]
pub struct History {
    events: VecDeque<Event>,
    most: usize,
    /// Blocks that were freed and still wait for other streams: size and stream.
    leaving: HashMap<Address, (u64, Stream)>,
}

impl History {
    /// Keeps so many events from now on.
    pub fn keep(&mut self, most: usize, clear: bool) {
        self.most = most.min(MOST);
        if clear {
            self.events.clear();
        }
        self.shorten();
    }

    pub fn events(&self) -> impl ExactSizeIterator<Item = &Event> {
        self.events.iter()
    }

    pub fn allocated(&mut self, at: Address, size: u64, stream: Stream, stack: StackId) {
        self.complete(at);
        self.push(Action::Alloc, at, size, stream, stack);
    }

    /// A block was given back; `waits` for other streams before it can be used again.
    pub fn freed(&mut self, at: Address, size: u64, stream: Stream, waits: bool, stack: StackId) {
        self.push(Action::FreeRequested, at, size, stream, stack);
        if waits {
            self.leaving.insert(at, (size, stream));
        } else {
            self.push(Action::FreeCompleted, at, size, stream, stack);
        }
    }

    pub fn refused(&mut self, free: u64, size: u64, stream: Stream, stack: StackId) {
        self.push(Action::OutOfMemory, free, size, stream, stack);
    }

    /// What the driver mapped and unmapped meanwhile.
    pub fn mapped(&mut self, entries: &[Entry], stream: Stream, stack: StackId) {
        for entry in entries {
            let action = match entry.change {
                Change::Mapped => Action::SegmentMap,
                Change::Unmapped => Action::SegmentUnmap,
                Change::Allocated => Action::SegmentAlloc,
                Change::Deallocated => Action::SegmentFree,
            };
            if matches!(action, Action::SegmentUnmap | Action::SegmentFree) {
                self.complete_within(entry.at, entry.size);
            }
            self.push(action, entry.at, entry.size, stream, stack);
        }
    }

    /// Completes what `done` says is no longer waiting.
    pub fn settle(&mut self, done: impl Fn(Address) -> bool) {
        let ready: Vec<Address> = self.leaving.keys().copied().filter(|&at| done(at)).collect();
        for at in ready {
            self.complete(at);
        }
    }

    fn complete(&mut self, at: Address) {
        if let Some((size, stream)) = self.leaving.remove(&at) {
            self.push(Action::FreeCompleted, at, size, stream, StackId::NONE);
        }
    }

    fn complete_within(&mut self, at: Address, size: u64) {
        self.settle_range(at..at + size);
    }

    fn settle_range(&mut self, range: std::ops::Range<Address>) {
        let inside: Vec<Address> = self.leaving.keys().copied().filter(|at| range.contains(at)).collect();
        for at in inside {
            self.complete(at);
        }
    }

    fn push(&mut self, action: Action, at: Address, size: u64, stream: Stream, stack: StackId) {
        if self.most == 0 {
            return;
        }
        let time_us =
            SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros() as u64);
        self.events.push_back(Event { action, at, size, stream, time_us, stack });
        self.shorten();
    }

    fn shorten(&mut self) {
        let over = self.events.len().saturating_sub(self.most);
        self.events.drain(..over);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(history: &History) -> Vec<(&'static str, Address)> {
        history.events().map(|event| (event.action.name(), event.at)).collect()
    }

    fn recording(most: usize) -> History {
        let mut history = History::default();
        history.keep(most, false);
        history
    }

    #[test]
    fn a_block_that_waits_is_completed_before_its_address_comes_again() {
        let mut history = recording(100);
        history.allocated(64, 10, Stream(1), StackId(7));
        history.freed(64, 10, Stream(1), true, StackId::NONE);
        history.allocated(128, 10, Stream(1), StackId(7));
        history.allocated(64, 20, Stream(1), StackId(8));
        assert_eq!(
            names(&history),
            [("alloc", 64), ("free_requested", 64), ("alloc", 128), ("free_completed", 64), ("alloc", 64)]
        );
    }

    #[test]
    fn what_waits_is_completed_when_it_is_done_or_its_pages_go() {
        let mut history = recording(100);
        history.freed(64, 10, Stream(1), true, StackId::NONE);
        history.settle(|_| false);
        assert_eq!(names(&history), [("free_requested", 64)]);
        history.settle(|at| at == 64);
        history.freed(4096, 10, Stream(1), true, StackId::NONE);
        let unmapped = Entry { change: Change::Unmapped, at: 4096, size: 4096 };
        history.mapped(&[unmapped], Stream(1), StackId(9));
        assert_eq!(
            names(&history)[1..],
            [
                ("free_completed", 64),
                ("free_requested", 4096),
                ("free_completed", 4096),
                ("segment_unmap", 4096)
            ]
        );
    }

    #[test]
    fn only_the_newest_events_are_kept() {
        let mut history = recording(3);
        for at in 0..10 {
            history.allocated(at, 1, Stream(0), StackId::NONE);
        }
        assert_eq!(names(&history), [("alloc", 7), ("alloc", 8), ("alloc", 9)]);
        history.keep(1, false);
        assert_eq!(names(&history), [("alloc", 9)]);
        history.keep(1, true);
        assert_eq!(history.events().len(), 0);
    }
}
