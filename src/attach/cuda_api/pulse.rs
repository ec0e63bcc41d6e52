//! Steps of a program that has no optimizer to tell them: from the history of its allocations, else by time.
//!
//! A program that works in rounds comes back to the same places. Once the history has a period, the place that
//! stands once in each round ends a step: at the next allocation after it, when what the round freed at its
//! end is free. While there is no period (a server whose requests differ), a step ends every second. Steps and
//! requests that the program tells itself end all this.
//!
//! Must not know CUDA. Invariants: bounded memory; a step is ended with no lock of ours held; a thread that
//! finds the history in use goes on without waiting.

use super::super::process::State;
use crate::replay::period;
use crate::stacks::StackId;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Allocations that are remembered for the search.
const HISTORY: usize = 1 << 13;
/// The first search; the next come at twice the length each, and then every `HISTORY` allocations.
const FIRST: usize = 24;
/// Rounds without the place that ends them after which it is believed no more.
const PATIENCE: usize = 20;
/// The length of a step by time.
const INTERVAL: Duration = Duration::from_secs(1);

static BY_HAND: AtomicBool = AtomicBool::new(false);
static PULSE: Mutex<Pulse> = Mutex::new(Pulse::new());

/// The program tells its steps or requests itself.
pub fn by_hand() {
    BY_HAND.store(true, Ordering::Relaxed);
}

/// A block is about to be born at `stack`: ends a step before it, if one is due.
pub fn before_a_block(state: &State, stack: StackId) {
    if BY_HAND.load(Ordering::Relaxed) {
        return;
    }
    let due = PULSE.try_lock().is_some_and(|mut pulse| pulse.beat(stack.0, Instant::now()));
    if due {
        state.step();
    }
}

/// What is known of the program's rounds.
#[derive(Debug)]
struct Pulse {
    /// Places of the last allocations, until a period was found.
    history: Vec<u64>,
    /// The length of the history at the next search.
    search_at: usize,
    /// The place that ends a round, and the allocations in a round.
    leader: Option<(u32, usize)>,
    /// Allocations since the leader was seen.
    since: usize,
    /// The leader was seen: the next allocation ends the step.
    due: bool,
    /// When the last step by time ended.
    last: Option<Instant>,
}

impl Pulse {
    const fn new() -> Pulse {
        Pulse { history: Vec::new(), search_at: FIRST, leader: None, since: 0, due: false, last: None }
    }

    /// Whether a step ends before this allocation.
    fn beat(&mut self, place: u32, now: Instant) -> bool {
        let due = std::mem::take(&mut self.due);
        let Some((leader, period)) = self.leader else {
            self.history.push(u64::from(place));
            if self.history.len() >= self.search_at {
                self.search();
            }
            return due || self.by_time(now);
        };
        if place == leader {
            (self.since, self.due) = (0, true);
        } else {
            self.since += 1;
            if self.since > PATIENCE * period {
                *self = Pulse { last: Some(now), ..Pulse::new() };
            }
        }
        due
    }

    fn by_time(&mut self, now: Instant) -> bool {
        let last = *self.last.get_or_insert(now);
        let over = now.saturating_duration_since(last) >= INTERVAL;
        if over {
            self.last = Some(now);
        }
        over
    }

    /// Looks for a period in the history.
    fn search(&mut self) {
        // A loop with one place has no distances to compare.
        let late = &self.history[self.history.len() / 2..];
        let one = late.first().copied().filter(|first| late.iter().all(|place| place == first));
        let found = one.map(|place| (place, 1)).or_else(|| {
            let found = period::find(&self.history)?;
            Some((self.history[found.ends.last()? - 1], found.period))
        });
        if let Some((leader, period)) = found {
            self.leader = u32::try_from(leader).ok().map(|leader| (leader, period));
            self.due = self.history.last() == Some(&leader);
            self.history = Vec::new();
        } else if self.search_at < HISTORY {
            self.search_at *= 2;
        } else {
            self.history.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps(places: impl IntoIterator<Item = u32>) -> Vec<usize> {
        let (mut pulse, now) = (Pulse::new(), Instant::now());
        places
            .into_iter()
            .enumerate()
            .filter(|(_, place)| pulse.beat(*place, now))
            .map(|(at, _)| at)
            .collect()
    }

    #[test]
    fn rounds_are_steps() {
        // Set-up, then rounds of three places, the middle one twice.
        let round = [1, 2, 2, 3];
        let found = steps((10..30).chain((0..200).flat_map(|_| round)));
        assert!(found.len() > 150, "{} steps", found.len());
        let late = &found[found.len() / 2..];
        assert!(late.windows(2).all(|pair| pair[1] - pair[0] == 4), "{late:?}");
    }

    #[test]
    fn a_loop_with_one_place_has_a_step_for_each() {
        let found = steps((0..100).map(|_| 7));
        assert!(found.len() >= 70, "{}", found.len());
    }

    #[test]
    fn a_second_is_a_step_where_nothing_repeats() {
        let (mut pulse, start) = (Pulse::new(), Instant::now());
        let mut state = 1u64;
        let mut ended = 0;
        for n in 0..20_000u64 {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ended += u32::from(pulse.beat((state >> 33) as u32 % 50, start + Duration::from_millis(n)));
        }
        assert!((18..=20).contains(&ended), "{ended}");
        assert!(pulse.history.len() <= HISTORY);
    }

    #[test]
    fn a_leader_that_stays_away_is_forgotten() {
        let (mut pulse, now) = (Pulse::new(), Instant::now());
        for n in 0..400 {
            pulse.beat(if n % 2 == 0 { 1 } else { 2 }, now);
        }
        assert!(pulse.leader.is_some());
        for n in 0..100_000 {
            pulse.beat(100 + n % 3, now);
        }
        assert!(matches!(pulse.leader, Some((100..=102, 3))), "{:?}", pulse.leader);
    }
}
