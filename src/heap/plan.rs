//! Plans: a repeated run of large requests is packed once, and then served without moving a page.
//!
//! Best fit does not find the layout of a training step that needs no more memory than the step's peak;
//! moving pages makes up for it, but at the cost of driver calls in every step. So, once pages have to
//! be moved, a lane's large requests are logged; when the log repeats itself, the lifetimes of one period
//! are packed into a range of addresses of their own, and from then on the expected request gets its
//! planned place. A request that is not the expected one, or whose place is taken, is served as ever: a
//! plan is advice and can be wrong without harm.
//!
//! This file knows sizes and times, no memory. Invariants: two planned places overlap only if their
//! lifetimes do not; the log is of fixed size.

use foldhash::fast::FixedState;
use hashbrown::HashMap;

use super::fit::GRAIN;
use super::pack::{Life, pack, pack_best};

/// Requests that the log remembers.
const LOG: usize = 8192;
/// The shortest period, in requests, that is worth a plan.
const SHORTEST: usize = 8;
/// So many requests together tell the place in the plan.
const CONTEXT: usize = 12;
/// Plans of one lane.
const PLANS: usize = 6;
/// After so many unexpected requests in a row the plan is not followed until its place is found again.
const LOST: u32 = 24;

#[derive(Clone, Copy, Default)]
struct Logged {
    size: u64,
    born: u64,
    /// 0 while it lives.
    died: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Planned {
    size: u64,
    /// None for a block that outlives the period.
    offset: Option<u64>,
    born: u64,
    length: u64,
}

/// One repeated run of requests with its places.
struct Plan {
    requests: Vec<Planned>,
    /// The end of the highest place.
    height: u64,
    /// Length of the period, in requests and frees.
    span: u64,
    /// How many requests there had been when it was made or mended.
    mended: u64,
}

/// The log of a lane's large requests, and the plans made from it: a job that trains and validates in turn
/// has one for each.
pub(super) struct Planner {
    log: Vec<Logged>,
    /// Requests and frees so far.
    time: u64,
    /// Requests so far.
    requests: u64,
    plans: Vec<Plan>,
    /// Where in which plan the latest requests end, by their sizes; none where that is not unique.
    places: HashMap<u64, Option<(u32, u32)>, FixedState>,
    /// The plan that is being followed, and the request that comes next.
    plan: usize,
    next: usize,
    /// Unexpected requests in a row.
    misses: u32,
    /// Pages moved since a plan was last looked for.
    pub moved: u64,
    /// Requests whose place was taken since then.
    pub blocked: u64,
    /// No new plan before this many requests.
    not_before: u64,
    patience: u64,
}

impl Planner {
    pub(super) fn new() -> Self {
        Planner {
            log: vec![Logged::default(); LOG],
            time: 0,
            requests: 0,
            plans: Vec::new(),
            places: HashMap::default(),
            plan: 0,
            next: 0,
            misses: 0,
            moved: 0,
            blocked: 0,
            not_before: 2 * SHORTEST as u64,
            patience: 64,
        }
    }

    /// Writes a request down; returns the number by which its free is known.
    pub(super) fn request(&mut self, size: u64) -> u32 {
        let number = self.requests;
        self.time += 1;
        self.log[number as usize % LOG] = Logged { size, born: self.time, died: 0 };
        self.requests += 1;
        number as u32
    }

    /// Writes a free down.
    pub(super) fn freed(&mut self, number: u32) {
        self.time += 1;
        let age = (self.requests as u32).wrapping_sub(number);
        if (1..=LOG as u32).contains(&age) {
            let index = (self.requests - u64::from(age)) as usize % LOG;
            self.log[index].died = self.time;
        }
    }

    fn logged(&self, back: usize) -> Logged {
        self.log[(self.requests as usize - 1 - back) % LOG]
    }

    /// The planned place of the request that was just written down, if it is the expected one.
    pub(super) fn place(&mut self, size: u64) -> Option<u64> {
        if self.plans.is_empty() {
            return None;
        }
        // An extra request leaves the place in the plan as it was. Where requests are missing, or another
        // plan begins, the latest requests tell the place, if together they occur in the plans once.
        let expected = self.plans.get(self.plan).map(|plan| plan.requests[self.next].size);
        let (plan, here) = if self.misses < LOST && expected == Some(size) {
            (self.plan, self.next)
        } else if let Some(&Some((plan, place))) = self.places.get(&self.context()) {
            (plan as usize, place as usize)
        } else {
            self.misses = self.misses.saturating_add(1);
            return None;
        };
        self.misses = 0;
        self.plan = plan;
        let requests = &self.plans[plan].requests;
        self.next = (here + 1) % requests.len();
        requests[here].offset
    }

    /// The sizes of the latest requests in one number.
    fn context(&self) -> u64 {
        mix((0..CONTEXT.min(self.requests as usize)).rev().map(|back| self.logged(back).size))
    }

    /// Whether a plan (or a better one) should be looked for now.
    pub(super) fn is_due(&self) -> bool {
        self.requests >= self.not_before && self.moved > 0
    }

    /// Whether a plan is being followed.
    pub(super) fn is_followed(&self) -> bool {
        !self.plans.is_empty() && self.misses < LOST
    }

    /// Looks for a period in the log and packs it into at most `room` bytes, around the blocks that have
    /// outlived their place there: `taken` has offset, size and number of every block that lies in the
    /// room. Returns whether there is a new plan.
    pub(super) fn make(&mut self, room: u64, taken: &[(u64, u64, u32)]) -> bool {
        self.moved = 0;
        let Some((lives, (count, span))) = self.period() else {
            self.wait_longer(64, 1 << 16);
            return false;
        };
        self.wait_longer(4 * count as u64, 64 * count as u64);
        let obstacles = self.obstacles(taken, count);
        let (offsets, height) = pack_best(&lives, &obstacles, span);
        if height > room {
            return false;
        }
        // The window began two periods ago, so the next request is the plan's first.
        let mut requests: Vec<Planned> = (0..count)
            .map(|request| Planned {
                size: self.logged(2 * count - 1 - request).size,
                offset: None,
                born: 0,
                length: 0,
            })
            .collect();
        for (life, offset) in lives.iter().zip(offsets) {
            let planned = &mut requests[life.request];
            (planned.offset, planned.born, planned.length) = (Some(offset), life.born, life.length);
        }
        let fresh = contexts(&requests);
        for index in (0..self.plans.len()).rev() {
            let old = &self.plans[index];
            let shared = contexts(&old.requests).iter().filter(|context| fresh.contains(*context)).count();
            if 2 * shared < old.requests.len().min(count) {
                continue;
            }
            // The same step again, or a part of it: another layout would only move everything once more.
            let same = old.requests.len() == count;
            if old.requests.len() > count || (same && height + height / 100 >= old.height) {
                return false;
            }
            self.plans.remove(index);
        }
        if self.plans.len() == PLANS {
            self.plans.remove(0);
        }
        self.plans.push(Plan { requests, height, span, mended: self.requests });
        self.index_places();
        (self.plan, self.next, self.misses, self.blocked) = (self.plans.len() - 1, 0, 0, 0);
        true
    }

    fn wait_longer(&mut self, least: u64, most: u64) {
        self.patience = (self.patience * 2).min(most).max(least);
        self.not_before = self.requests + self.patience;
    }

    fn index_places(&mut self) {
        self.places.clear();
        for (index, plan) in self.plans.iter().enumerate() {
            for (place, context) in contexts(&plan.requests).into_iter().enumerate() {
                let here = Some((index as u32, place as u32));
                let seen = self.places.entry(context).or_insert(here);
                if *seen != here {
                    *seen = None;
                }
            }
        }
    }

    /// Whether places are taken by blocks that outlive the period.
    pub(super) fn is_blocked(&self) -> bool {
        let plan = self.plans.get(self.plan);
        self.blocked > 0 && plan.is_some_and(|plan| self.requests >= plan.mended + plan.requests.len() as u64)
    }

    /// Gives new places to those requests whose place is taken by a block that has outlived a period; the
    /// others keep theirs, so that little moves.
    pub(super) fn mend(&mut self, taken: &[(u64, u64, u32)]) {
        self.blocked = 0;
        let Some(count) = self.plans.get(self.plan).map(|plan| plan.requests.len()) else { return };
        let obstacles = self.obstacles(taken, count);
        let now = self.requests;
        let plan = &mut self.plans[self.plan];
        plan.mended = now;
        let (mut homeless, mut settled, mut given) = (Vec::new(), Vec::new(), Vec::new());
        for (request, planned) in plan.requests.iter().enumerate() {
            let Some(offset) = planned.offset else { continue };
            let (size, born, length) = (planned.size.next_multiple_of(GRAIN), planned.born, planned.length);
            let life = Life { request, size, born, length };
            if obstacles.iter().any(|&(at, taken)| at < offset + size && offset < at + taken) {
                homeless.push(life);
            } else {
                settled.push(life);
                given.push(offset);
            }
        }
        let count = homeless.len();
        homeless.sort_by_key(|life| std::cmp::Reverse(life.size));
        let order: Vec<usize> = (0..count).collect();
        let mut all = homeless;
        all.append(&mut settled);
        all.extend(obstacles.iter().map(|&(_, size)| Life { request: 0, size, born: 0, length: plan.span }));
        given.extend(obstacles.iter().map(|&(offset, _)| offset));
        let (offsets, height) = pack(&all, &order, &given, plan.span);
        for (life, offset) in all[..count].iter().zip(offsets) {
            plan.requests[life.request].offset = Some(offset);
        }
        plan.height = plan.height.max(height);
    }

    /// The blocks of `taken` that have outlived a period of `count` requests: offset and size.
    fn obstacles(&self, taken: &[(u64, u64, u32)], count: usize) -> Vec<(u64, u64)> {
        let stays = |number: u32| (self.requests as u32).wrapping_sub(number) as usize > count;
        taken.iter().filter(|block| stays(block.2)).map(|block| (block.0, block.1)).collect()
    }

    /// The lives of one period: the shortest with which the log has repeated itself and within which as
    /// much of what is born also dies as within any. With it, the period in requests and in time.
    fn period(&self) -> Option<(Vec<Life>, (usize, u64))> {
        let known = (self.requests as usize).min(LOG);
        let borders = borders((0..known).map(|back| self.logged(back).size));
        let mut periods: Vec<usize> = (1..=known)
            .map(|length| (length, length - borders[length - 1] as usize))
            .filter(|&(length, period)| period >= SHORTEST && 2 * period < length)
            .map(|(_, period)| period)
            .collect();
        periods.sort_unstable();
        periods.dedup();
        // In percent of the bytes.
        let mut best = (79, None);
        for count in periods.into_iter().take(64) {
            let (lives, time) = self.lives(count);
            let bytes: u64 = (0..count).map(|back| self.logged(back).size).sum();
            let planned: u64 = lives.iter().map(|life| life.size).sum();
            let share = planned.saturating_mul(100) / bytes.max(1);
            if share > best.0 + u64::from(best.1.is_some()) {
                best = (share, Some((lives, (count, time))));
            }
        }
        best.1
    }

    /// The lives that end within a period, of the one that ended a period ago; and its length in time.
    fn lives(&self, count: usize) -> (Vec<Life>, u64) {
        let first = self.logged(2 * count - 1);
        let time = self.logged(count - 1).born - first.born;
        let logged = (0..count).map(|request| (request, self.logged(2 * count - 1 - request)));
        let lives = logged.filter(|(_, logged)| logged.died != 0 && logged.died - logged.born < time).map(
            |(request, logged)| Life {
                request,
                size: logged.size.next_multiple_of(GRAIN),
                born: logged.born - first.born,
                length: logged.died - logged.born,
            },
        );
        (lives.collect(), time)
    }
}

/// For every place in a plan, the sizes of the requests up to there in one number.
fn contexts(requests: &[Planned]) -> Vec<u64> {
    let count = requests.len();
    let before = count * CONTEXT - CONTEXT + 1;
    let size = |place: usize, i: usize| requests[(place + before + i) % count].size;
    (0..count).map(|place| mix((0..CONTEXT).map(|i| size(place, i)))).collect()
}

fn mix(sizes: impl Iterator<Item = u64>) -> u64 {
    sizes.fold(0, |sum, size| (sum.rotate_left(7) ^ size).wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

/// For every prefix, the length of its longest proper prefix that is also its suffix.
fn borders(items: impl Iterator<Item = u64>) -> Vec<u32> {
    let items: Vec<u64> = items.collect();
    let mut borders = vec![0u32; items.len()];
    let mut length = 0;
    for index in 1..items.len() {
        while length > 0 && items[index] != items[length] {
            length = borders[length - 1] as usize;
        }
        if items[index] == items[length] {
            length += 1;
        }
        borders[index] = length as u32;
    }
    borders
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A step: forward keeps, backward frees, each layer with a workspace.
    fn step(planner: &mut Planner, mut see: impl FnMut(u64, Option<u64>)) {
        let mut ask = |planner: &mut Planner, size: u64| {
            let number = planner.request(size);
            let place = planner.place(size);
            see(size, place);
            number
        };
        let mut kept = Vec::new();
        for layer in 1..9u64 {
            let workspace = ask(planner, layer * 7 * GRAIN);
            kept.push(ask(planner, layer * 10 * GRAIN));
            planner.freed(workspace);
        }
        while let Some(number) = kept.pop() {
            let gradient = ask(planner, (1 + kept.len() as u64) * 10 * GRAIN);
            planner.freed(number);
            planner.freed(gradient);
        }
    }

    fn planned() -> Planner {
        let mut planner = Planner::new();
        for _ in 0..3 {
            step(&mut planner, |_, _| {});
        }
        assert!(planner.make(u64::MAX, &[]));
        assert_eq!(planner.plans[0].requests.len(), 24);
        planner
    }

    #[test]
    fn a_repeated_step_is_planned() {
        let mut planner = planned();
        let mut places = 0;
        step(&mut planner, |_, place| places += u32::from(place.is_some()));
        assert_eq!(places, 24);
        let kept: u64 = (1..9).map(|layer| layer * 10 * GRAIN).sum();
        let height = planner.plans[0].height;
        assert!(height <= kept + 80 * GRAIN, "{height} for {kept}");
    }

    #[test]
    fn an_extra_or_a_missing_request_does_not_lose_the_place() {
        let mut planner = planned();
        let mut places = 0;
        planner.request(999 * GRAIN);
        assert_eq!(planner.place(999 * GRAIN), None);
        step(&mut planner, |_, place| places += u32::from(place.is_some()));
        assert_eq!(places, 24);
        planner.next = 2;
        step(&mut planner, |_, place| places += u32::from(place.is_some()));
        assert!(places >= 48 - CONTEXT as u32, "{places}");
    }

    #[test]
    fn a_lost_place_is_found_again() {
        let mut planner = planned();
        for _ in 0..60 {
            let number = planner.request(12345 * GRAIN);
            assert_eq!(planner.place(12345 * GRAIN), None);
            planner.freed(number);
        }
        assert!(!planner.is_followed());
        step(&mut planner, |_, _| {});
        let mut places = 0;
        step(&mut planner, |_, place| places += u32::from(place.is_some()));
        assert_eq!(places, 24);
    }

    #[test]
    fn what_never_repeats_is_not_planned() {
        let mut planner = Planner::new();
        for size in 1..20_000u64 {
            let number = planner.request(size * GRAIN);
            planner.freed(number);
        }
        planner.moved = 1;
        assert!(planner.is_due() && !planner.make(u64::MAX, &[]) && !planner.is_due());
    }
}
