//! Launches of guard mode whose findings are not in yet: where each leaves them, and when they may be read.
//!
//! A launch is done when an event that was recorded behind it on its stream is done; one event stands for a batch of
//! launches. Must not know: what is looked for. Invariants: a slot is lent to one launch at a time, and comes back
//! only after that launch is known to be done; nothing waits for the device; of a stream that is gone the slots stay
//! lent. Each stream's launches in flight are counted, so that a full queue of the driver's is never waited at.

use super::Block;
use crate::driver::{Driver, DriverError, Event, Result, Stream};
use std::collections::VecDeque;

/// Launches that one event stands for.
const BATCH: usize = 64;
/// Launches in flight on one stream, at most: the driver takes about 1,024, the job's own among them, and holds the
/// next one up until the stream gets on.
const IN_FLIGHT: usize = 256;

/// What a launch looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Looked {
    /// The patterns around a block.
    Edges,
    /// The poison in a freed block.
    Poison,
}

/// A launch that was made.
#[derive(Clone, Copy, Debug)]
pub struct Check {
    pub slot: u32,
    pub looked: Looked,
    pub block: Block,
}

/// The launches of one stream, in their order.
struct Queue {
    stream: Stream,
    /// Behind the last event: launches that leave findings, and all launches.
    open: Vec<Check>,
    launches: usize,
    sealed: VecDeque<(Event, Vec<Check>, usize)>,
}

/// Every launch that is not known to be done.
pub struct Checks {
    free: Vec<u32>,
    queues: Vec<Queue>,
}

impl Checks {
    /// With so many slots.
    pub fn new(slots: u32) -> Self {
        Checks { free: (0..slots).rev().collect(), queues: Vec::new() }
    }

    /// A slot for the next launch; none while all are lent.
    pub fn borrow(&mut self) -> Option<u32> {
        self.free.pop()
    }

    /// Takes a slot back whose launch was not made, or whose findings were read.
    pub fn give_back(&mut self, slot: u32) {
        self.free.push(slot);
    }

    /// A launch was made; `check` if it leaves findings. Every so often an event is recorded behind it.
    pub fn launched(&mut self, driver: &impl Driver, stream: Stream, check: Option<Check>) -> Result<()> {
        let place = self.queues.iter().position(|queue| queue.stream == stream).unwrap_or_else(|| {
            self.queues.push(Queue { stream, open: Vec::new(), launches: 0, sealed: VecDeque::new() });
            self.queues.len() - 1
        });
        let queue = &mut self.queues[place];
        queue.open.extend(check);
        queue.launches += 1;
        if queue.launches >= BATCH { queue.seal(driver) } else { Ok(()) }
    }

    /// Launches on a stream that are not known to be done.
    pub fn in_flight(&self, stream: Stream) -> usize {
        self.queues.iter().find(|queue| queue.stream == stream).map_or(0, Queue::in_flight)
    }

    /// Whether one more launch on a stream is sure not to be held up by those before it.
    pub fn has_room(&self, stream: Stream) -> bool {
        self.in_flight(stream) < IN_FLIGHT
    }

    /// A stream is gone: what was launched behind its last event is not known to be done, ever.
    pub fn forget(&mut self, stream: Stream) {
        for queue in self.queues.iter_mut().filter(|queue| queue.stream == stream) {
            queue.open.clear();
            queue.launches = 0;
        }
    }

    /// Records an event behind the last launch of each stream that is not `closed`; where not `all`, only of those
    /// that have none outstanding.
    pub fn seal(
        &mut self,
        driver: &impl Driver,
        all: bool,
        mut closed: impl FnMut(Stream) -> bool,
    ) -> Result<()> {
        for queue in &mut self.queues {
            if queue.launches > 0 && (all || queue.sealed.is_empty()) && !closed(queue.stream) {
                queue.seal(driver)?;
            }
        }
        Ok(())
    }

    /// The launches that are done since the last call. The caller reads their slots and gives them back.
    pub fn done(&mut self, driver: &impl Driver) -> Result<Vec<Check>> {
        let mut done = Vec::new();
        for queue in &mut self.queues {
            while let Some((event, ..)) = queue.sealed.front() {
                if !driver.query_event(*event)? {
                    break;
                }
                if let Some((event, checks, _)) = queue.sealed.pop_front() {
                    driver.release_event(event)?;
                    done.extend(checks);
                }
            }
        }
        self.queues.retain(|queue| queue.in_flight() > 0);
        Ok(done)
    }

    /// Whether an event was recorded that is not known to be done.
    pub fn waits(&self) -> bool {
        self.queues.iter().any(|queue| !queue.sealed.is_empty())
    }
}

impl Queue {
    fn in_flight(&self) -> usize {
        self.launches + self.sealed.iter().map(|(_, _, launches)| launches).sum::<usize>()
    }

    fn seal(&mut self, driver: &impl Driver) -> Result<()> {
        let event = match driver.record_event(self.stream) {
            Err(error) if is_handle_gone(&error) => {
                (self.open, self.launches) = (Vec::new(), 0);
                return Ok(());
            }
            recorded => recorded?,
        };
        self.sealed.push_back((event, std::mem::take(&mut self.open), std::mem::take(&mut self.launches)));
        Ok(())
    }
}

/// Whether an error says that there is no such stream any more.
pub fn is_handle_gone(error: &DriverError) -> bool {
    /// `CUDA_ERROR_INVALID_HANDLE`.
    const INVALID_HANDLE: i32 = 400;
    matches!(error, DriverError::Failed { code: INVALID_HANDLE, .. })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::host::HostDriver;

    fn check(slot: u32) -> Check {
        Check { slot, looked: Looked::Edges, block: Block { at: 0, size: 1, born: 0, freed: 0 } }
    }

    fn slots(checks: &[Check]) -> Vec<u32> {
        checks.iter().map(|check| check.slot).collect()
    }

    #[test]
    fn findings_are_read_only_behind_an_event() {
        let driver = HostDriver::with_memory(1 << 30);
        let mut checks = Checks::new(200);
        for _ in 0..BATCH + 1 {
            let slot = checks.borrow().expect("a slot");
            checks.launched(&driver, Stream(7), Some(check(slot))).expect("an event");
        }
        let done = checks.done(&driver).expect("a query");
        assert_eq!(
            slots(&done),
            (0..BATCH as u32).collect::<Vec<_>>(),
            "the batch, and not the one behind it"
        );
        assert!(!checks.waits());
        checks.seal(&driver, true, |_| true).expect("nothing to do");
        assert!(!checks.waits(), "a stream that captures is left alone");
        checks.seal(&driver, false, |stream| stream != Stream(7)).expect("an event");
        assert!(checks.waits());
        assert_eq!(slots(&checks.done(&driver).expect("a query")), [BATCH as u32]);
    }

    #[test]
    fn launches_in_flight_are_bounded_and_each_stream_s_own() {
        let driver = HostDriver::with_memory(1 << 30);
        let mut checks = Checks::new(1);
        for n in 0..IN_FLIGHT {
            assert!(checks.has_room(Stream(7)), "{n}");
            checks.launched(&driver, Stream(7), None).expect("an event");
        }
        assert!(!checks.has_room(Stream(7)) && checks.has_room(Stream(8)));
        assert_eq!(checks.done(&driver).expect("a query").len(), 0);
        assert!(checks.has_room(Stream(7)), "they are done");
        checks.launched(&driver, Stream(7), None).expect("no event yet");
        checks.forget(Stream(7));
        assert_eq!(checks.in_flight(Stream(7)), 0);
    }

    #[test]
    fn a_slot_is_lent_once() {
        let mut checks = Checks::new(2);
        let (one, two) = (checks.borrow(), checks.borrow());
        assert_eq!((one, two, checks.borrow()), (Some(0), Some(1), None));
        checks.give_back(1);
        assert_eq!(checks.borrow(), Some(1));
    }
}
