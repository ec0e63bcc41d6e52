//! Cohorts: a site's live blocks counted by the step of their birth, in a small sorted table.
//!
//! Must not know: addresses, stacks, judgement.
//! Invariant: blocks and bytes are exact; entries are sorted, disjoint and never empty; at most
//! [`COHORTS`] of them. When full, old neighbours are merged so that the newest [`EXACT`] stay step-exact
//! and older ones cover spans that grow with their age.

/// Most entries of one table.
pub const COHORTS: usize = 18;
/// The newest entries, never merged.
pub const EXACT: usize = 11;

/// Live blocks born in the steps `first..=last`; `steps` of these had a birth that was alive at the
/// time of a merge (an upper bound after later deaths: see [`Cohort::events`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cohort {
    pub first: u32,
    pub last: u32,
    pub steps: u32,
    pub blocks: u32,
    pub bytes: u64,
}

impl Cohort {
    /// In how many steps of the span a block was born that is still alive; exact when the span is one step.
    pub fn events(&self) -> u32 {
        self.steps.min(self.blocks)
    }
}

/// The table: the running step's cohort apart (the fast path), the others sorted.
#[derive(Clone, Debug)]
pub struct Cohorts {
    fresh: Cohort,
    old: Vec<Cohort>,
}

impl Default for Cohorts {
    fn default() -> Cohorts {
        Cohorts { fresh: Cohort { steps: 1, ..Cohort::default() }, old: Vec::new() }
    }
}

impl Cohorts {
    /// A block was born in `step`, which is not below any step seen before.
    #[inline]
    pub fn add(&mut self, step: u32, size: u64) {
        if self.fresh.last != step {
            self.roll(step);
        }
        self.fresh.blocks += 1;
        self.fresh.bytes += size;
    }

    /// A block that was born in `step` and had died is there again.
    pub fn add_again(&mut self, step: u32, size: u64) {
        if step >= self.fresh.last {
            return self.add(step, size);
        }
        let of = |old: &[Cohort]| old.partition_point(|cohort| cohort.last < step);
        let mut at = of(&self.old);
        let is_in = |old: &[Cohort], at: usize| old.get(at).is_some_and(|cohort| cohort.first <= step);
        if !is_in(&self.old, at) && self.old.len() == COHORTS - 1 {
            self.merge();
            at = of(&self.old);
        }
        if !is_in(&self.old, at) {
            self.old.insert(at, Cohort { first: step, last: step, steps: 1, blocks: 0, bytes: 0 });
        }
        self.old[at].blocks += 1;
        self.old[at].bytes += size;
    }

    /// A block born in `step` died.
    #[inline]
    pub fn remove(&mut self, step: u32, size: u64) {
        if self.fresh.last == step && self.fresh.blocks > 0 {
            self.fresh.blocks -= 1;
            self.fresh.bytes = self.fresh.bytes.saturating_sub(size);
        } else {
            self.remove_old(step, size);
        }
    }

    fn remove_old(&mut self, step: u32, size: u64) {
        let Some(at) = self.old.iter().rposition(|cohort| cohort.first <= step) else { return };
        let cohort = &mut self.old[at];
        if cohort.last < step {
            return; // not ours: a block that was never counted
        }
        cohort.blocks -= 1;
        cohort.bytes = cohort.bytes.saturating_sub(size);
        if cohort.blocks == 0 {
            self.old.remove(at);
        }
    }

    /// Files the fresh cohort and opens one for `step`.
    fn roll(&mut self, step: u32) {
        if self.fresh.blocks > 0 {
            if self.old.len() == COHORTS - 1 {
                self.merge();
            }
            if self.old.len() == self.old.capacity() {
                let more = if self.old.is_empty() { 2 } else { self.old.len() };
                self.old.reserve_exact(more.min(COHORTS - 1 - self.old.len()));
            }
            self.old.push(self.fresh);
        }
        self.fresh = Cohort { first: step, last: step, steps: 1, blocks: 0, bytes: 0 };
    }

    /// Joins the pair of old neighbours whose span is shortest for its age.
    fn merge(&mut self) {
        let end = self.fresh.last;
        let mut best = (f32::INFINITY, 0);
        for at in 0..self.old.len() - EXACT {
            let span = (self.old[at + 1].last - self.old[at].first) as f32;
            let age = (end - self.old[at + 1].last).max(1) as f32;
            if span / age < best.0 {
                best = (span / age, at);
            }
        }
        let next = self.old.remove(best.1 + 1);
        let into = &mut self.old[best.1];
        into.steps = into.events() + next.events();
        into.last = next.last;
        into.blocks += next.blocks;
        into.bytes += next.bytes;
    }

    /// Every non-empty entry, oldest first.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &Cohort> {
        self.old.iter().chain((self.fresh.blocks > 0).then_some(&self.fresh))
    }

    /// The cohort of the newest step in which this site gave birth (it may be empty).
    pub fn fresh(&self) -> &Cohort {
        &self.fresh
    }

    pub fn len(&self) -> usize {
        self.old.len() + usize::from(self.fresh.blocks > 0)
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn memory_bytes(&self) -> usize {
        self.old.capacity() * size_of::<Cohort>()
    }

    /// Panics unless the invariant holds.
    pub fn check(&self, blocks: u64, bytes: u64) {
        let entries: Vec<&Cohort> = self.iter().collect();
        assert!(entries.len() <= COHORTS);
        assert_eq!(entries.iter().map(|c| u64::from(c.blocks)).sum::<u64>(), blocks);
        assert_eq!(entries.iter().map(|c| c.bytes).sum::<u64>(), bytes);
        assert!(entries.iter().all(|c| c.blocks > 0 && c.first <= c.last && c.steps >= 1));
        assert!(entries.windows(2).all(|pair| pair[0].last < pair[1].first));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recent_steps_stay_exact_however_long_it_runs() {
        let mut cohorts = Cohorts::default();
        for step in 0..100_000 {
            cohorts.add(step, 512);
        }
        cohorts.check(100_000, 512 * 100_000);
        let entries: Vec<&Cohort> = cohorts.iter().collect();
        assert!(entries.iter().rev().take(EXACT).all(|c| c.first == c.last && c.blocks == 1));
        assert_eq!(entries.iter().map(|c| c.events()).sum::<u32>(), 100_000);
        assert_eq!(entries[0].first, 0);
    }

    #[test]
    fn a_block_that_is_there_again_is_of_its_old_step() {
        let mut cohorts = Cohorts::default();
        for step in 0..200 {
            cohorts.add(step * 2, 10);
        }
        // Steps of their own, steps inside of old spans, the newest, and one after it.
        for (count, step) in [398, 397, 390, 377, 3, 0, 100, 399].into_iter().enumerate() {
            cohorts.add_again(step, 7);
            cohorts.check(201 + count as u64, 2000 + 7 * (1 + count as u64));
            assert!(cohorts.iter().any(|cohort| (cohort.first..=cohort.last).contains(&step)));
        }
        assert!(cohorts.iter().any(|cohort| cohort.first == 397 && cohort.last == 397));
        for step in [398, 397, 390, 377, 3, 0, 100, 399] {
            cohorts.remove(step, 7);
        }
        cohorts.check(200, 2000);
    }

    #[test]
    fn bursts_stay_apart() {
        let mut cohorts = Cohorts::default();
        for burst in 0..16 {
            cohorts.add(burst * 50, 10);
        }
        let steps: Vec<u32> = cohorts.iter().map(|c| c.first).collect();
        assert_eq!(steps, (0..16).map(|b| b * 50).collect::<Vec<_>>());
    }
}
