//! What a test turns on a soft device: faults on request, and a count of every call.
//!
//! It knows the names of the calls, not what they do.

use crate::driver::DriverError;

/// The calls of [`Driver`](crate::driver::Driver) that are counted and may be made to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Call {
    MemoryInfo,
    Reserve,
    Unreserve,
    Create,
    Destroy,
    Map,
    Unmap,
    Allocate,
    Deallocate,
    RecordEvent,
    QueryEvent,
    WaitEvent,
    ReleaseEvent,
    StreamWaitEvent,
    SynchronizeStream,
    SynchronizeDevice,
    IsCapturing,
}

const CALLS: usize = Call::IsCapturing as usize + 1;

/// How often each call was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Calls([u64; CALLS]);

impl Calls {
    /// Calls of one kind.
    pub fn of(&self, call: Call) -> u64 {
        self.0[call as usize]
    }

    /// Calls of all kinds.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }

    /// Calls that make, move or give back memory: the expensive ones.
    pub fn memory(&self) -> u64 {
        use Call::*;
        [Reserve, Unreserve, Create, Destroy, Map, Unmap, Allocate, Deallocate]
            .iter()
            .map(|&call| self.of(call))
            .sum()
    }

    pub(super) fn count(&mut self, call: Call) {
        self.0[call as usize] += 1;
    }
}

/// Faults that are still to come.
#[derive(Default)]
pub(super) struct Faults(Vec<Fault>);

struct Fault {
    call: Option<Call>,
    left: u64,
    error: DriverError,
}

impl Faults {
    pub(super) fn add(&mut self, call: Option<Call>, nth: u64, error: DriverError) {
        self.0.push(Fault { call, left: nth.max(1), error });
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// The fault that is due at this call, if any.
    pub(super) fn next(&mut self, call: Call) -> Option<DriverError> {
        let mut due = None;
        for (i, fault) in self.0.iter_mut().enumerate() {
            if fault.call.is_none_or(|only| only == call) {
                fault.left -= 1;
                if fault.left == 0 {
                    due = Some(i);
                    break;
                }
            }
        }
        due.map(|i| self.0.remove(i).error)
    }
}
