//! The trail: where the same request lay the last time.
//!
//! A job repeats itself: its requests come in the order in which they came a step ago. The trail is a log of
//! a lane's requests with their addresses and a place in it, one period back, that is followed as long as
//! the sizes agree; where they do not, the latest sizes tell the place. What is expected is advice and can be
//! wrong without harm.
//!
//! It knows sizes and addresses, no memory. Invariant: the log is of fixed size.

use foldhash::fast::FixedState;
use hashbrown::HashMap;

use super::Address;

/// Requests that the log remembers.
const LOG: usize = 1 << 15;
/// So many requests together tell the place in the log.
const CONTEXT: usize = 8;
/// So many requests may be skipped, or be new, before the place is lost.
const SLIP: usize = 3;

#[derive(Clone, Copy, Default)]
struct Step {
    size: u64,
    at: Address,
    /// How many requests ago the same request came the time before; 0 where that is not known.
    back: u32,
}

/// The log of a lane's requests.
pub(super) struct Trail {
    log: Vec<Step>,
    /// Requests so far; the next one's number.
    count: usize,
    /// The number of the request that is expected next; none where the place is lost.
    follow: Option<usize>,
    misses: usize,
    /// Where the latest requests of a context were last seen: the number of the request after them.
    places: HashMap<u64, usize, FixedState>,
}

impl Trail {
    pub(super) fn new() -> Self {
        Trail {
            log: vec![Step::default(); LOG],
            count: 0,
            follow: None,
            misses: 0,
            places: HashMap::default(),
        }
    }

    /// Writes a request down, and which earlier one it repeats.
    pub(super) fn expect(&mut self, size: u64) -> bool {
        let found = self.recognise(size);
        if let Some(number) = found {
            let last = self.count - 1;
            self.log[last % LOG].back = (last - number) as u32;
        }
        found.is_some()
    }

    /// Where the latest request lay the last time, the time before, and so on.
    pub(super) fn earlier(&self) -> impl Iterator<Item = Address> + '_ {
        let mut number = self.count - 1;
        std::iter::from_fn(move || {
            let back = self.log[number % LOG].back as usize;
            number -= back;
            if back == 0 || !self.knows(number) { None } else { Some(self.log[number % LOG].at) }
        })
        .filter(|&at| at != 0)
    }

    fn recognise(&mut self, size: u64) -> Option<usize> {
        self.log[self.count % LOG] = Step { size, at: 0, back: 0 };
        self.count += 1;
        let found = self.find(size);
        match found {
            Some(number) => {
                self.misses = 0;
                self.follow = Some(number + 1);
            }
            None => {
                self.misses += 1;
                if self.misses > SLIP {
                    self.follow = None;
                }
            }
        }
        if self.count >= CONTEXT {
            let context = self.context();
            if self.places.len() >= 2 * LOG {
                self.places.clear();
            }
            let seen = self.places.insert(context, self.count);
            if found.is_none() && let Some(seen) = seen && self.knows(seen - 1) {
                self.follow = Some(seen);
                self.misses = 0;
                return Some(seen - 1);
            }
        }
        found
    }

    fn knows(&self, number: usize) -> bool {
        number + 1 < self.count && number + LOG > self.count
    }

    /// The request with this size at the place that is followed, or a little later.
    fn find(&self, size: u64) -> Option<usize> {
        let follow = self.follow?;
        (follow..follow + SLIP).find(|&number| self.knows(number) && self.log[number % LOG].size == size)
    }

    /// Writes down where the latest request lies.
    pub(super) fn lies(&mut self, at: Address) {
        self.log[(self.count - 1) % LOG].at = at;
    }

    fn context(&self) -> u64 {
        let sizes = (self.count - CONTEXT..self.count).map(|number| self.log[number % LOG].size);
        sizes.fold(0, |sum, size| (sum.rotate_left(7) ^ size).wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }
}
