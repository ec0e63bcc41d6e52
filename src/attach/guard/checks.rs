//! Launches of guard mode whose findings are not in yet: where each leaves them, and when they may be read.
//!
//! A launch is done when an event that was recorded behind it on its stream is done; one event stands for a batch of
//! launches. Must not know: what is looked for. Invariants: a slot is lent to one launch at a time, and comes back
//! only after that launch is known to be done; nothing waits for the device.

use super::Block;
use crate::driver::{Driver, Event, Result, Stream};
use std::collections::VecDeque;

/// Launches that one event stands for.
const BATCH: usize = 64;

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
    /// Behind the last event.
    open: Vec<Check>,
    sealed: VecDeque<(Event, Vec<Check>)>,
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

    /// A launch was made. Every so often an event is recorded behind it.
    pub fn launched(&mut self, driver: &impl Driver, stream: Stream, check: Check) -> Result<()> {
        let place = self.queues.iter().position(|queue| queue.stream == stream).unwrap_or_else(|| {
            self.queues.push(Queue { stream, open: Vec::with_capacity(BATCH), sealed: VecDeque::new() });
            self.queues.len() - 1
        });
        let queue = &mut self.queues[place];
        queue.open.push(check);
        if queue.open.len() >= BATCH { queue.seal(driver) } else { Ok(()) }
    }

    /// Records an event behind the last launch of each stream that is not `closed`.
    pub fn seal(&mut self, driver: &impl Driver, mut closed: impl FnMut(Stream) -> bool) -> Result<()> {
        for queue in &mut self.queues {
            if !queue.open.is_empty() && !closed(queue.stream) {
                queue.seal(driver)?;
            }
        }
        Ok(())
    }

    /// The launches that are done since the last call. The caller reads their slots and gives them back.
    pub fn done(&mut self, driver: &impl Driver) -> Result<Vec<Check>> {
        let mut done = Vec::new();
        for queue in &mut self.queues {
            while let Some((event, _)) = queue.sealed.front() {
                if !driver.query_event(*event)? {
                    break;
                }
                if let Some((event, checks)) = queue.sealed.pop_front() {
                    driver.release_event(event)?;
                    done.extend(checks);
                }
            }
        }
        Ok(done)
    }

    /// Whether an event was recorded that is not known to be done.
    pub fn waits(&self) -> bool {
        self.queues.iter().any(|queue| !queue.sealed.is_empty())
    }
}

impl Queue {
    fn seal(&mut self, driver: &impl Driver) -> Result<()> {
        let event = driver.record_event(self.stream)?;
        self.sealed.push_back((event, std::mem::replace(&mut self.open, Vec::with_capacity(BATCH))));
        Ok(())
    }
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
            checks.launched(&driver, Stream(7), check(slot)).expect("an event");
        }
        let done = checks.done(&driver).expect("a query");
        assert_eq!(
            slots(&done),
            (0..BATCH as u32).collect::<Vec<_>>(),
            "the batch, and not the one behind it"
        );
        assert!(!checks.waits());
        checks.seal(&driver, |_| true).expect("nothing to do");
        assert!(!checks.waits(), "a stream that captures is left alone");
        checks.seal(&driver, |stream| stream != Stream(7)).expect("an event");
        assert!(checks.waits());
        assert_eq!(slots(&checks.done(&driver).expect("a query")), [BATCH as u32]);
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
