//! The end of the run: everything that is held back and every block that is live is looked at once more.
//!
//! Must not know what a pattern is. Invariants: it ends at the time that it is given, whatever the streams do; other
//! threads may allocate and free meanwhile, so under the lock, before each launch, the block is looked for again.

use super::{DeviceGuard, Driven, Held, Inner, edges};
use crate::attach::guard::checks::Looked;
use crate::attach::guard::{Block, Faults, POISON};
use crate::attach::say;
use crate::attach::served::patience;
use parking_lot::MutexGuard;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Launches on one stream at a time; the next ones when these are done.
const CHUNK: usize = 128;
/// Blocks that are asked after in one look, so that the lock is not held for long.
const ROUND: usize = 1024;

impl Inner {
    /// Whether a freed block is still held back, and not another one at its place.
    fn holds(&self, held: &Held) -> bool {
        self.held.binary_search_by_key(&held.number, |other| other.number).is_ok()
    }

    /// Whether a block is still the live one that it was.
    fn has_live(&self, held: &Held) -> bool {
        self.live.get(&held.block.at).is_some_and(|live| live.number == held.number)
    }
}

impl DeviceGuard {
    /// Looks at everything, and waits for what is found, but not beyond `until`.
    pub fn finish(&self, served: &Driven, faults: &Faults, quiet: bool, until: Instant) {
        self.settle(served, faults, until, |inner| !inner.waiting.is_empty());
        let Some(mut inner) = self.inner.try_lock_for(patience()) else { return };
        inner.last = true;
        let held: Vec<Held> = inner.held.iter().copied().collect();
        let live = inner.live.iter().map(|(at, live)| Held {
            block: Block { at: *at, size: live.size, born: live.born, freed: 0 },
            stream: live.stream,
            number: live.number,
        });
        let live: Vec<Held> = live.collect();
        drop(inner);
        let mut left = self.look_at_last(served, faults, until, held, |inner, held| {
            inner.holds(held).then(|| self.look_at_poison(inner, *held))
        });
        left += self.look_at_last(served, faults, until, live, |inner, held| {
            inner.has_live(held).then(|| {
                self.launch(inner, *held, Looked::Edges, |slot| {
                    self.kernels.retire(held.stream, &edges(&held.block), 0, POISON, slot)
                })
            })
        });
        self.settle(served, faults, until, |inner| inner.checks.waits());
        self.over.store(true, Ordering::Relaxed);
        let Some(mut inner) = self.inner.try_lock_for(patience()) else { return };
        inner.skipped.late += left;
        let text = inner.skipped.text(self.budget / 2);
        drop(inner);
        if let (Some(text), false) = (text, quiet) {
            say(format_args!("guard mode, GPU {}: {text}", self.device));
        }
    }

    /// Looks at blocks, few at a time on each stream; how many could not be looked at in time. `look` says nothing of a
    /// block that is not what it was.
    fn look_at_last(
        &self,
        served: &Driven,
        faults: &Faults,
        until: Instant,
        mut blocks: Vec<Held>,
        look: impl Fn(&mut Inner, &Held) -> Option<bool>,
    ) -> u64 {
        let mut unseen = 0;
        while !blocks.is_empty() && !self.is_over() && Instant::now() < until {
            let Some(mut inner) = self.in_time(served) else { break };
            self.poll(&mut inner, served);
            // What waits behind its stream is put to the end, where it holds nobody up.
            let rest = blocks.split_off(blocks.len().saturating_sub(ROUND));
            let (mut later, mut idle) = (Vec::new(), true);
            for held in rest {
                if self.is_over() {
                    break;
                }
                if inner.checks.in_flight(held.stream) >= CHUNK {
                    later.push(held);
                } else if self.is_closed(served, held.stream) {
                    unseen += 1;
                } else {
                    idle = false;
                    unseen += u64::from(look(&mut inner, &held) == Some(false));
                }
            }
            later.append(&mut blocks);
            blocks = later;
            self.tell(inner, faults);
            if idle {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        unseen + blocks.len() as u64
    }

    /// The lock, if it and the device's books are to be had: somebody may hold them who waits for a stuck stream.
    fn in_time(&self, served: &Driven) -> Option<MutexGuard<'_, Inner>> {
        let inner = self.inner.try_lock_for(patience())?;
        served.books().map(|_| inner)
    }

    /// Polls until nothing `waits`, or the time is over.
    fn settle(&self, served: &Driven, faults: &Faults, until: Instant, waits: impl Fn(&Inner) -> bool) {
        loop {
            let Some(mut inner) = self.in_time(served) else { return };
            inner.urgent = true;
            self.poll(&mut inner, served);
            // A capture that never ended (an exception in it) will not end now.
            let again = waits(&inner) && !self.is_over() && !served.lock().heap.is_recording();
            self.tell(inner, faults);
            if !again || Instant::now() > until {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
