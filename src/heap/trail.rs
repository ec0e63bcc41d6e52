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
/// So many earlier occurrences of a request are looked at.
const FORERUNNERS: usize = 2;
/// So many requests may be skipped, or be new, before the place is lost.
const SLIP: usize = 3;

#[derive(Clone, Copy, Default)]
struct Step {
    site: u32,
    size: u64,
    at: Address,
    /// How many requests ago the same request came the time before; 0 where that is not known.
    back: u32,
    /// How many requests came until it was freed, and one; 0 while it is not.
    lived: u32,
    /// What was paid to mend its place since it got a new one, in microseconds.
    paid: u32,
}

impl Step {
    /// How many requests there had been when it, request `number`, was freed; 0 while it is not.
    fn died(&self, number: usize) -> usize {
        if self.lived == 0 { 0 } else { number + self.lived as usize }
    }
}

/// The log of a lane's requests.
pub(super) struct Trail {
    log: Vec<Step>,
    /// Requests so far; the next one's number.
    count: usize,
    /// The number of the request that is expected next; none where the place is lost.
    follow: Option<usize>,
    misses: usize,
    /// How many requests there had been when it last led anywhere.
    led: usize,
    /// Sites are known.
    sited: bool,
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
            led: 0,
            sited: false,
            places: HashMap::default(),
        }
    }

    /// Writes a request down, and which earlier one it repeats.
    pub(super) fn expect(&mut self, site: u32, size: u64) -> bool {
        let found = self.recognise(site, size);
        if let Some(number) = found {
            let last = self.count - 1;
            self.log[last % LOG].back = (last - number) as u32;
            self.log[last % LOG].paid = self.log[number % LOG].paid;
        }
        found.is_some()
    }

    /// The latest request.
    pub(super) fn latest(&self) -> usize {
        self.count - 1
    }

    /// The request that `number` repeats, and where it lay; 0 if nowhere in this lane.
    pub(super) fn before(&self, number: usize) -> Option<(usize, Address)> {
        let back = self.log[number % LOG].back as usize;
        let earlier = number - back;
        (back != 0 && self.knows(earlier)).then(|| (earlier, self.log[earlier % LOG].at))
    }

    fn recognise(&mut self, site: u32, size: u64) -> Option<usize> {
        self.sited |= site != 0;
        self.log[self.count % LOG] = Step { site, size, at: 0, back: 0, lived: 0, paid: 0 };
        self.count += 1;
        let found = self.find(site, size);
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
            if found.is_none()
                && let Some(seen) = seen
                && self.knows(seen - 1)
            {
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
    fn find(&self, site: u32, size: u64) -> Option<usize> {
        let follow = self.follow?;
        let near = || (follow..follow + SLIP).filter(|&number| self.knows(number));
        let step = |number: usize| self.log[number % LOG];
        let same = |&number: &usize| step(number).site == site && step(number).size == size;
        near().find(same).or_else(|| near().find(|&number| self.sited && step(number).site == site))
    }

    /// Notes whether it leads anywhere; whether it has not for long.
    pub(super) fn is_lost(&mut self, leads: bool) -> bool {
        if leads {
            self.led = self.count;
        }
        self.count - self.led >= LOG / 2
    }

    /// Writes down where the latest request lies; returns the number by which its free is known.
    pub(super) fn lies(&mut self, at: Address) -> u32 {
        self.log[(self.count - 1) % LOG].at = at;
        self.count as u32
    }

    /// What was paid to mend the latest request's place since it got a new one.
    pub(super) fn paid(&self) -> u64 {
        u64::from(self.log[(self.count - 1) % LOG].paid)
    }

    /// Writes down what had to be paid in all.
    pub(super) fn pay(&mut self, paid: u64) {
        self.log[(self.count - 1) % LOG].paid = paid.try_into().unwrap_or(u32::MAX);
    }

    /// Writes a free down.
    pub(super) fn freed(&mut self, number: u32) {
        let age = (self.count as u32).wrapping_sub(number).wrapping_add(1) as usize;
        if (1..LOG).contains(&age) {
            self.log[(self.count - age) % LOG].lived = age as u32;
        }
    }

    /// The places, with sizes, of the requests that were there at the same time as the latest one's
    /// forerunners: they will be so again.
    pub(super) fn rivals(&self) -> impl Iterator<Item = (Address, u64)> + '_ {
        let mut number = self.count.saturating_sub(1);
        let mut left = FORERUNNERS;
        std::iter::from_fn(move || {
            let back = self.log[number % LOG].back as usize;
            number = number.wrapping_sub(back);
            left = left.checked_sub(1)?;
            if back == 0 || !self.knows(number) { None } else { Some((number, back)) }
        })
        .flat_map(move |(forerunner, period)| {
            let died = self.log[forerunner % LOG].died(forerunner);
            let until = if died == 0 { forerunner + period } else { died }.min(self.count.saturating_sub(1));
            (forerunner.saturating_sub(period)..until).filter_map(move |number| {
                let step = self.log[number % LOG];
                let there = step.died(number) > forerunner && number != forerunner && step.at != 0;
                (there && self.knows(number)).then_some((step.at, step.size))
            })
        })
    }

    /// Whether the same requests stayed: the one before the last is there still.
    pub(super) fn stays(&self) -> bool {
        let mut number = self.count - 1;
        for _ in 0..2 {
            let back = self.log[number % LOG].back as usize;
            number = number.wrapping_sub(back);
            if back == 0 || !self.knows(number) {
                return false;
            }
        }
        self.log[number % LOG].lived == 0
    }

    fn context(&self) -> u64 {
        let key = |number: usize| {
            let Step { site, size, .. } = self.log[number % LOG];
            if site == 0 || !self.sited { size } else { u64::from(site) }
        };
        let keys = (self.count - CONTEXT..self.count).map(key);
        keys.fold(0, |sum, key| (sum.rotate_left(7) ^ key).wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where the latest request lay the last time.
    fn last_place(trail: &Trail) -> Option<Address> {
        trail.before(trail.latest()).map(|(_, at)| at)
    }

    const STEP: [u64; 12] = [7, 3, 9, 3, 3, 8, 1, 2, 6, 5, 5, 4];

    /// One step: every request is given an address of its own; how many knew where they lay before.
    fn step(trail: &mut Trail, round: u64, site: impl Fn(usize) -> u32) -> usize {
        let mut known = 0;
        for (place, &size) in STEP.iter().enumerate() {
            trail.expect(site(place), size + if site(place) > 0 { round } else { 0 });
            let before = (round - 1) * 100 + place as u64 + 1;
            known += usize::from(round > 1 && last_place(trail) == Some(before));
            let number = trail.lies(round * 100 + place as u64 + 1);
            trail.freed(number);
        }
        known
    }

    #[test]
    fn a_repeated_step_is_recognised_by_sizes() {
        let mut trail = Trail::new();
        step(&mut trail, 1, |_| 0);
        assert!(step(&mut trail, 2, |_| 0) >= STEP.len() - CONTEXT, "the first requests tell the place");
        assert_eq!(step(&mut trail, 3, |_| 0), STEP.len());
    }

    #[test]
    fn sites_tell_a_step_whose_sizes_change() {
        let mut trail = Trail::new();
        for round in 1..3 {
            step(&mut trail, round, |place| place as u32 + 1);
        }
        assert_eq!(step(&mut trail, 3, |place| place as u32 + 1), STEP.len());
    }

    #[test]
    fn an_extra_or_a_missing_request_does_not_lose_the_place() {
        let mut trail = Trail::new();
        (1..4).for_each(|round| _ = step(&mut trail, round, |_| 0));
        trail.expect(0, 999);
        trail.lies(1);
        assert_eq!(step(&mut trail, 4, |_| 0), STEP.len());
        // The first is missing.
        for (place, &size) in STEP.iter().enumerate().skip(1) {
            trail.expect(0, size);
            assert_eq!(last_place(&trail), Some(401 + place as u64), "{place}");
            trail.lies(501 + place as u64);
        }
    }

    #[test]
    fn what_stays_twice_is_expected_to_stay() {
        let mut trail = Trail::new();
        for round in 0..4 {
            let mut number = 0;
            for (place, size) in (1..20).enumerate() {
                trail.expect(0, size);
                let stays = trail.stays();
                assert_eq!(stays, round >= 3 && place == 5, "round {round}, request {place}");
                let this = trail.lies(1 + size);
                // The sixth is never freed, the seventh when it comes again.
                match place {
                    5 => {}
                    6 => number = this,
                    _ => trail.freed(this),
                }
            }
            trail.freed(number);
        }
    }

    #[test]
    fn rivals_are_those_that_were_there_at_the_same_time() {
        let mut trail = Trail::new();
        for _ in 0..3 {
            // The first lives through the second and the third, which do not meet.
            let mut numbers = Vec::new();
            for size in 1..=10u64 {
                trail.expect(0, size);
                let number = trail.lies(size * 1000);
                if size == 1 { numbers.push(number) } else { trail.freed(number) }
            }
            numbers.into_iter().for_each(|number| trail.freed(number));
        }
        trail.expect(0, 1);
        trail.expect(0, 2);
        let rivals: Vec<u64> = trail.rivals().map(|(at, _)| at).collect();
        assert!(rivals.contains(&1000) && !rivals.contains(&3000), "{rivals:?}");
    }

    #[test]
    fn a_trail_without_requests_knows_nothing() {
        let trail = Trail::new();
        assert_eq!((trail.rivals().count(), trail.count), (0, 0));
    }

    #[test]
    fn the_log_wraps_without_harm() {
        let mut trail = Trail::new();
        let first = {
            trail.expect(0, 1);
            trail.lies(8)
        };
        for size in 0..3 * LOG as u64 {
            trail.expect((size % 5) as u32, size);
            let number = trail.lies(8 + size);
            trail.rivals().take(4).for_each(drop);
            trail.freed(number);
        }
        trail.freed(first);
        assert!(!trail.stays());
    }
}
