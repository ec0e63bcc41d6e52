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

/// Requests that the log remembers.
const LOG: usize = 8192;
/// The shortest period, in requests, that is worth a plan.
const SHORTEST: usize = 8;
/// So many requests together tell the place in the plan.
const CONTEXT: usize = 12;
/// After so many unexpected requests in a row the plan is not followed until its place is found again.
const LOST: u32 = 24;

#[derive(Clone, Copy, Default)]
struct Logged {
    size: u64,
    born: u64,
    /// 0 while it lives.
    died: u64,
}

/// A block's life within a period.
#[derive(Clone, Copy, Debug)]
struct Life {
    request: usize,
    size: u64,
    born: u64,
    length: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Planned {
    size: u64,
    /// None for a block that outlives the period.
    offset: Option<u64>,
    born: u64,
    length: u64,
}

/// The log of a lane's large requests, and the plan made from it.
pub(super) struct Planner {
    log: Vec<Logged>,
    /// Requests and frees so far.
    time: u64,
    /// Requests so far.
    requests: u64,
    plan: Vec<Planned>,
    height: u64,
    /// Where in the plan the latest requests end, by their sizes; none where that is not unique.
    places: HashMap<u64, Option<u32>, FixedState>,
    next: usize,
    /// Unexpected requests in a row.
    misses: u32,
    /// Pages moved since the plan was made (or looked for).
    pub moved: u64,
    /// Requests whose place was taken since the plan was made or repaired.
    pub blocked: u64,
    /// Requests when it was.
    mended: u64,
    /// Length of the period, in requests and frees.
    span: u64,
    /// No new plan before this many requests.
    pub not_before: u64,
    patience: u64,
}

impl Planner {
    pub(super) fn new() -> Self {
        Planner {
            log: vec![Logged::default(); LOG],
            time: 0,
            requests: 0,
            plan: Vec::new(),
            height: 0,
            places: HashMap::default(),
            next: 0,
            misses: 0,
            moved: 0,
            blocked: 0,
            mended: 0,
            span: 0,
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
        if self.plan.is_empty() {
            return None;
        }
        // An extra request leaves the place in the plan as it was. Where requests are missing, the latest
        // ones tell the place, if together they occur in the plan once.
        let here = if self.misses < LOST && self.plan[self.next].size == size {
            self.next
        } else if let Some(&Some(place)) = self.places.get(&self.context()) {
            place as usize
        } else {
            self.misses = self.misses.saturating_add(1);
            return None;
        };
        self.misses = 0;
        self.next = (here + 1) % self.plan.len();
        self.plan[here].offset
    }

    /// The sizes of the latest requests in one number.
    fn context(&self) -> u64 {
        mix((0..CONTEXT.min(self.requests as usize)).rev().map(|back| self.logged(back).size))
    }

    /// Whether a plan (or a better one) should be looked for now.
    pub(super) fn is_due(&self) -> bool {
        self.requests >= self.not_before && self.moved > 0
    }

    /// Whether the plan is being followed.
    pub(super) fn is_followed(&self) -> bool {
        !self.plan.is_empty() && self.misses < LOST
    }

    /// Looks for a period in the log and packs it into at most `room` bytes, around the blocks that have
    /// outlived their place there: `taken` has offset, size and number of every block that lies in the
    /// room. Returns whether there is a new plan.
    pub(super) fn make(&mut self, room: u64, taken: &[(u64, u64, u32)]) -> bool {
        self.moved = 0;
        let Some((lives, period)) = self.period() else {
            self.not_before = self.requests + self.patience;
            self.patience = (self.patience * 2).min(1 << 16);
            return false;
        };
        let count = period.0;
        let obstacles = self.obstacles(taken, count);
        let (offsets, height) = pack_best(&lives, &obstacles, period.1);
        if height > room {
            self.not_before = self.requests + 1024;
            return false;
        }
        let sum = |sizes: &mut dyn Iterator<Item = u64>| sizes.sum::<u64>();
        let same = self.plan.len() == count
            && sum(&mut self.plan.iter().map(|planned| planned.size))
                == sum(&mut (0..count).map(|back| self.logged(back).size));
        self.patience = (self.patience * 2).min(64 * count as u64).max(4 * count as u64);
        self.not_before = self.requests + self.patience;
        if same && height + height / 100 >= self.height {
            // The same step again: another layout would only move everything once more.
            return false;
        }
        // The window began two periods ago, so the next request is the plan's first.
        self.plan = (0..count)
            .map(|request| Planned {
                size: self.logged(2 * count - 1 - request).size,
                offset: None,
                born: 0,
                length: 0,
            })
            .collect();
        for (life, offset) in lives.iter().zip(offsets) {
            let planned = &mut self.plan[life.request];
            (planned.offset, planned.born, planned.length) = (Some(offset), life.born, life.length);
        }
        self.places.clear();
        for place in 0..count {
            let sizes =
                (0..CONTEXT).map(|i| self.plan[(place + count * CONTEXT - CONTEXT + 1 + i) % count].size);
            let seen = self.places.entry(mix(sizes)).or_insert(Some(place as u32));
            if *seen != Some(place as u32) {
                *seen = None;
            }
        }
        (self.next, self.misses, self.height) = (0, 0, height);
        (self.mended, self.blocked, self.span) = (self.requests, 0, period.1);
        true
    }

    /// Whether places are taken by blocks that outlive the period.
    pub(super) fn is_blocked(&self) -> bool {
        self.blocked > 0 && self.requests >= self.mended + self.plan.len() as u64
    }

    /// Gives new places to those requests whose place is taken by a block that has outlived a period; the
    /// others keep theirs, so that little moves.
    pub(super) fn mend(&mut self, taken: &[(u64, u64, u32)]) {
        (self.mended, self.blocked) = (self.requests, 0);
        let obstacles = self.obstacles(taken, self.plan.len());
        let hit = |planned: &Planned, offset: u64| {
            obstacles.iter().any(|&(at, size)| at < offset + planned.size && offset < at + size)
        };
        let (mut homeless, mut settled, mut given) = (Vec::new(), Vec::new(), Vec::new());
        for (request, planned) in self.plan.iter().enumerate() {
            let Some(offset) = planned.offset else { continue };
            let (size, born, length) = (planned.size.next_multiple_of(GRAIN), planned.born, planned.length);
            let life = Life { request, size, born, length };
            if hit(planned, offset) {
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
        all.extend(obstacles.iter().map(|&(_, size)| Life { request: 0, size, born: 0, length: self.span }));
        given.extend(obstacles.iter().map(|&(offset, _)| offset));
        let (offsets, height) = pack(&all, &order, &given, self.span);
        for (life, offset) in all[..count].iter().zip(offsets) {
            self.plan[life.request].offset = Some(offset);
        }
        self.height = self.height.max(height);
    }

    /// The blocks of `taken` that have outlived a period of `count` requests: offset and size.
    fn obstacles(&self, taken: &[(u64, u64, u32)], count: usize) -> Vec<(u64, u64)> {
        let stays = |number: u32| (self.requests as u32).wrapping_sub(number) as usize > count;
        taken.iter().filter(|block| stays(block.2)).map(|block| (block.0, block.1)).collect()
    }

    /// The lives of one period: the shortest with which the log has repeated itself and within which
    /// nearly everything that is born also dies. With it, the period in requests and in time.
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
        periods.into_iter().find_map(|count| {
            let first = self.logged(2 * count - 1);
            let time = self.logged(count - 1).born - first.born;
            let logged = (0..count).map(|request| (request, self.logged(2 * count - 1 - request)));
            let bytes: u64 = logged.clone().map(|(_, logged)| logged.size).sum();
            let lives: Vec<Life> = logged
                .filter(|(_, logged)| logged.died != 0 && logged.died - logged.born < time)
                .map(|(request, logged)| Life {
                    request,
                    size: logged.size.next_multiple_of(GRAIN),
                    born: logged.born - first.born,
                    length: logged.died - logged.born,
                })
                .collect();
            let planned: u64 = lives.iter().map(|life| life.size).sum();
            (planned > bytes / 10 * 8).then_some((lives, (count, time)))
        })
    }
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

/// The lowest of three packings: largest first, longest-lived first, largest area first.
fn pack_best(lives: &[Life], obstacles: &[(u64, u64)], time: u64) -> (Vec<u64>, u64) {
    // An obstacle is a life that never ends, with its place given.
    let mut all: Vec<Life> = lives.to_vec();
    all.extend(obstacles.iter().map(|&(_, size)| Life { request: 0, size, born: 0, length: time }));
    let given: Vec<u64> = obstacles.iter().map(|&(offset, _)| offset).collect();

    let keys: [fn(&Life) -> u128; 3] = [
        |life| u128::from(life.size),
        |life| u128::from(life.length),
        |life| u128::from(life.size) * u128::from(life.length),
    ];
    let packings = keys.into_iter().map(|key| {
        let mut order: Vec<usize> = (0..lives.len()).collect();
        order.sort_by_key(|&index| (std::cmp::Reverse(key(&lives[index])), lives[index].born));
        pack(&all, &order, &given, time)
    });
    let (mut offsets, height) = packings.min_by_key(|&(_, height)| height).unwrap_or_default();
    offsets.truncate(lives.len());
    (offsets, height)
}

/// Packs lives that recur every `time` into the lowest places, in the order given; the last ones have
/// their places already.
fn pack(lives: &[Life], order: &[usize], given: &[u64], time: u64) -> (Vec<u64>, u64) {
    let mut offsets = vec![0; lives.len()];
    let free = lives.len() - given.len();
    offsets[free..].copy_from_slice(given);
    // By offset.
    let mut placed: Vec<usize> = (free..lives.len()).collect();
    placed.sort_by_key(|&index| offsets[index]);
    let mut height = 0;
    for &index in order {
        let mut at = 0;
        for &other in &placed {
            if meet(&lives[index], &lives[other], time) {
                if offsets[other] >= at + lives[index].size {
                    break;
                }
                at = at.max(offsets[other] + lives[other].size);
            }
        }
        offsets[index] = at;
        height = height.max(at + lives[index].size);
        let place = placed.partition_point(|&other| offsets[other] <= at);
        placed.insert(place, index);
    }
    (offsets, height)
}

/// Whether two recurring lives are ever lived at once.
fn meet(a: &Life, b: &Life, time: u64) -> bool {
    let after = |from: u64, to: u64| (to + time - from) % time;
    after(a.born, b.born) < a.length || after(b.born, a.born) < b.length
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
        assert_eq!(planner.plan.len(), 24);
        planner
    }

    #[test]
    fn a_repeated_step_is_planned_without_overlap() {
        let mut planner = planned();
        let mut places = 0;
        step(&mut planner, |_, place| places += u32::from(place.is_some()));
        assert_eq!(places, 24);
        let (lives, (count, time)) = planner.period().unwrap();
        assert_eq!(count, 24);
        let (offsets, height) = pack_best(&lives, &[], time);
        for (i, a) in lives.iter().enumerate() {
            for (j, b) in lives.iter().enumerate().skip(i + 1) {
                let apart = offsets[i] + a.size <= offsets[j] || offsets[j] + b.size <= offsets[i];
                assert!(apart || !meet(a, b, time), "{a:?} and {b:?}");
            }
        }
        let kept: u64 = (1..9).map(|layer| layer * 10 * GRAIN).sum();
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
