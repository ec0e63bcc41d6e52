//! Requests of a server that are open: what one made it may still use, however many others ended meanwhile.
//!
//! Must not know: threads, who opens them.
//! Invariant: a request holds judgement back for at most [`LONGEST`] steps, and takes no memory after that.

use parking_lot::Mutex;
use std::collections::BTreeMap;

/// Steps after which an open request is like any other part of the program: a connection that is never closed.
const LONGEST: u32 = 256;

/// How many requests are open, by the step in which they began.
#[derive(Debug, Default)]
pub(super) struct Requests(Mutex<BTreeMap<u32, u32>>);

impl Requests {
    pub(super) fn open(&self, step: u32) {
        *self.0.lock().entry(step).or_insert(0) += 1;
    }

    pub(super) fn close(&self, step: u32) {
        let mut open = self.0.lock();
        if let Some(count) = open.get_mut(&step) {
            *count -= 1;
            if *count == 0 {
                open.remove(&step);
            }
        }
    }

    /// The step in which the oldest of those that are open began, as seen in step `now`.
    pub(super) fn since(&self, now: u32) -> Option<u32> {
        let mut open = self.0.lock();
        while let Some(entry) = open.first_entry().filter(|entry| now - now.min(*entry.key()) > LONGEST) {
            entry.remove();
        }
        open.first_key_value().map(|(step, _)| *step)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_that_is_open_counts_for_a_while() {
        let requests = Requests::default();
        assert_eq!(requests.since(9), None);
        [7, 7, 9].into_iter().for_each(|step| requests.open(step));
        assert_eq!(requests.since(9), Some(7));
        requests.close(7);
        assert_eq!(requests.since(50), Some(7));
        requests.close(7);
        requests.close(7);
        assert_eq!((requests.since(9 + LONGEST), requests.since(10 + LONGEST)), (Some(9), None));
        requests.close(9);
        assert_eq!(requests.since(0), None);
    }
}
