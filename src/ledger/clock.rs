//! The clock: which step, epoch and phase the program is in, readable with one atomic load.
//!
//! Must not know: who turns it (Python hooks, C callers, a replayed trace).
//! Invariant: step and epoch never go backwards; a reading is one consistent word.

use super::requests::Requests;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};

/// How many epoch starts and step durations are remembered.
const REMEMBERED: usize = 64;
pub(crate) const EPOCH_BITS: u32 = 20;
const EPOCH_MASK: u64 = (1 << EPOCH_BITS) - 1;
pub(crate) const PHASE_BITS: u32 = 6;
const PHASE_MASK: u64 = ((1 << PHASE_BITS) - 1) << EPOCH_BITS;
const COLLECTING: u64 = 1 << (EPOCH_BITS + PHASE_BITS);
/// Phases that a program may name itself, and the longest name that is kept.
pub const OWN_PHASES: usize = 32;
const LONGEST: usize = 40;

/// What the program is doing (STRANDLINE_PHASE_*).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Phase {
    #[default]
    Other,
    Forward,
    Backward,
    Optimizer,
    Validation,
    /// One that the program named, below [`OWN_PHASES`]: [`Clock::phase_name`] knows the name.
    Own(u8),
}

/// Every phase that needs no name, in the order of its number.
pub const PHASES: [Phase; 5] =
    [Phase::Other, Phase::Forward, Phase::Backward, Phase::Optimizer, Phase::Validation];
/// Numbers of phases.
pub const PHASE_NUMBERS: usize = PHASES.len() + OWN_PHASES;

impl Phase {
    pub const fn from_number(number: u32) -> Option<Phase> {
        match number as usize {
            known if known < PHASES.len() => Some(PHASES[known]),
            own if own < PHASE_NUMBERS => Some(Phase::Own((own - PHASES.len()) as u8)),
            _ => None,
        }
    }

    pub const fn number(self) -> usize {
        match self {
            Phase::Other => 0,
            Phase::Forward => 1,
            Phase::Backward => 2,
            Phase::Optimizer => 3,
            Phase::Validation => 4,
            Phase::Own(own) => PHASES.len() + own as usize,
        }
    }

    /// The name of a phase that needs none of the program's.
    const fn name(self) -> &'static str {
        match self {
            Phase::Other | Phase::Own(_) => "other",
            Phase::Forward => "forward",
            Phase::Backward => "backward",
            Phase::Optimizer => "optimizer",
            Phase::Validation => "validation",
        }
    }
}

/// A reading of the clock: a block's generation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Now {
    pub step: u32,
    pub epoch: u32,
    pub phase: Phase,
    /// Python's garbage collector is at work: what dies now was part of a reference cycle.
    pub collecting: bool,
}

/// An epoch and the step that was running when it began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EpochStart {
    pub epoch: u32,
    pub step: u32,
}

#[derive(Debug, Default)]
struct Records {
    epochs: VecDeque<EpochStart>,
    /// Epochs announced that had at least one step, and whether steps came before the first of them.
    begun: u64,
    late: bool,
    /// Steps that were running when a validation began.
    validations: VecDeque<u32>,
    /// Nanoseconds each recent step took.
    durations: VecDeque<u64>,
    last_end: Option<u64>,
    /// The names that the program gave to phases.
    phases: Vec<String>,
}

/// Step (32 bits), epoch (20), phase (6) and the collector's bit in one word, and a short record of recent epochs and
/// durations.
#[derive(Debug, Default)]
pub struct Clock {
    word: AtomicU64,
    records: Mutex<Records>,
    requests: Requests,
}

const fn unpack(word: u64) -> Now {
    let phase = match Phase::from_number(((word & PHASE_MASK) >> EPOCH_BITS) as u32) {
        Some(phase) => phase,
        None => Phase::Other,
    };
    Now {
        step: (word >> 32) as u32,
        epoch: (word & EPOCH_MASK) as u32,
        phase,
        collecting: word & COLLECTING != 0,
    }
}

impl Clock {
    pub fn new() -> Clock {
        Clock::default()
    }

    /// The present reading. One relaxed load: a block born while another thread ends the step may count
    /// for either step.
    #[inline]
    pub fn now(&self) -> Now {
        unpack(self.word.load(Ordering::Relaxed))
    }

    /// A step ended, at `nanoseconds` of any steady clock. Returns the number of the step that ended
    /// (the first is 0).
    pub fn end_step(&self, nanoseconds: u64) -> u32 {
        let mut records = self.records.lock();
        if let Some(last) = records.last_end.replace(nanoseconds) {
            if records.durations.len() == REMEMBERED {
                records.durations.pop_front();
            }
            records.durations.push_back(nanoseconds.saturating_sub(last));
        }
        let before = self.word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |word| {
            (word >> 32 < u64::from(u32::MAX)).then(|| word + (1 << 32))
        });
        unpack(before.unwrap_or_else(|word| word)).step
    }

    /// A request of a server begins. Returns the step, by which its end must be [told](Self::request_closes).
    pub fn request_opens(&self) -> u32 {
        let step = self.now().step;
        self.requests.open(step);
        step
    }

    /// A request that began in `step` ended.
    pub fn request_closes(&self, step: u32) {
        self.requests.close(step);
    }

    /// The step in which the oldest request began that is open.
    pub fn open_since(&self) -> Option<u32> {
        self.requests.since(self.now().step)
    }

    /// A new epoch began. Returns its number: the first epoch that is announced has number 1.
    pub fn begin_epoch(&self) -> u32 {
        let mut records = self.records.lock();
        let before = self.word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |word| {
            (word & EPOCH_MASK < EPOCH_MASK).then(|| word + 1)
        });
        let Ok(before) = before else { return EPOCH_MASK as u32 };
        let start = EpochStart { epoch: unpack(before).epoch + 1, step: unpack(before).step };
        match records.epochs.back_mut() {
            // An epoch without a single step (a validation loader, a peek at the data) is not one.
            Some(last) if last.step == start.step => *last = start,
            _ => {
                records.late |= records.begun == 0 && start.step > 0;
                records.begun += 1;
                if records.epochs.len() == REMEMBERED {
                    records.epochs.pop_front();
                }
                records.epochs.push_back(start);
            }
        }
        start.epoch
    }

    /// The program enters a phase. Returns the phase that was in force.
    pub fn enter(&self, phase: Phase) -> Phase {
        let before = self.word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |word| {
            Some(word & !PHASE_MASK | (phase.number() as u64) << EPOCH_BITS)
        });
        let before = unpack(before.unwrap_or_else(|word| word));
        if phase == Phase::Validation && before.phase != phase {
            let mut records = self.records.lock();
            if records.validations.back() != Some(&before.step) {
                if records.validations.len() == REMEMBERED {
                    records.validations.pop_front();
                }
                records.validations.push_back(before.step);
            }
        }
        before.phase
    }

    /// Whether nobody holds the record for longer than `patience`.
    pub fn answers(&self, patience: std::time::Duration) -> bool {
        self.records.try_lock_for(patience).is_some()
    }

    /// The phase of a name: a known one, or one of the program's own. None where it has named too many.
    pub fn phase_of(&self, name: &str) -> Option<Phase> {
        let name: String = name.trim().chars().take(LONGEST).collect();
        if let Some(known) = PHASES.into_iter().find(|phase| phase.name() == name) {
            return Some(known);
        }
        let mut records = self.records.lock();
        let known = records.phases.iter().position(|phase| *phase == name);
        if known.is_none() && records.phases.len() == OWN_PHASES {
            return None;
        }
        let own = known.unwrap_or_else(|| {
            records.phases.push(name);
            records.phases.len() - 1
        });
        Some(Phase::Own(own as u8))
    }

    /// What a phase is called.
    pub fn phase_name(&self, phase: Phase) -> String {
        let own = match phase {
            Phase::Own(own) => self.records.lock().phases.get(usize::from(own)).cloned(),
            _ => None,
        };
        own.unwrap_or_else(|| phase.name().to_owned())
    }

    /// Steps that were running when a validation began: the newest, oldest first.
    pub fn validations(&self) -> Vec<u32> {
        self.records.lock().validations.iter().copied().collect()
    }

    /// Python's garbage collector begins or ends its work.
    pub fn collecting(&self, on: bool) {
        if on {
            self.word.fetch_or(COLLECTING, Ordering::Relaxed);
        } else {
            self.word.fetch_and(!COLLECTING, Ordering::Relaxed);
        }
    }

    /// Epochs that had at least one step, once any was announced. Where steps came before the first
    /// announcement, they were an epoch too: hooks see a first epoch end and not begin.
    pub fn epochs(&self) -> u64 {
        let records = self.records.lock();
        let empty = records.epochs.back().is_some_and(|last| last.step == self.now().step);
        (records.begun + u64::from(records.late)).saturating_sub(u64::from(empty))
    }

    /// Recent epochs that had at least one step, oldest first.
    pub fn epoch_starts(&self) -> Vec<EpochStart> {
        self.records.lock().epochs.iter().copied().collect()
    }

    /// The median duration of recent steps in seconds.
    pub fn step_seconds(&self) -> Option<f64> {
        let mut durations: Vec<u64> = self.records.lock().durations.iter().copied().collect();
        if durations.len() < 3 {
            return None;
        }
        let middle = durations.len() / 2;
        Some(*durations.select_nth_unstable(middle).1 as f64 * 1e-9)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_back_what_was_set() {
        let clock = Clock::new();
        assert_eq!(clock.now(), Now::default());
        assert_eq!(clock.end_step(1), 0);
        assert_eq!(clock.end_step(2), 1);
        assert_eq!(clock.begin_epoch(), 1);
        assert_eq!(clock.enter(Phase::Validation), Phase::Other);
        assert_eq!(clock.enter(Phase::Backward), Phase::Validation);
        assert_eq!(clock.validations(), [2]);
        assert_eq!(clock.now(), Now { step: 2, epoch: 1, phase: Phase::Backward, ..Now::default() });
        clock.collecting(true);
        assert!(clock.now().collecting && clock.now().step == 2);
        clock.collecting(false);
        assert!(!clock.now().collecting);
    }

    #[test]
    fn phases_of_the_programs_own_are_known_by_name_up_to_a_bound() {
        let clock = Clock::new();
        assert_eq!(clock.phase_of(" backward "), Some(Phase::Backward));
        let rollout = clock.phase_of("rollout").unwrap();
        assert_eq!(clock.enter(rollout), Phase::Other);
        clock.collecting(true);
        assert_eq!(clock.now(), Now { phase: rollout, collecting: true, ..Now::default() });
        assert_eq!((clock.phase_of("rollout"), clock.phase_name(rollout)), (Some(rollout), "rollout".into()));
        let named: Vec<_> = (0..40).map(|n| clock.phase_of(&format!("phase {n}"))).collect();
        assert_eq!(named.iter().flatten().count(), OWN_PHASES - 1);
        for number in 0..PHASE_NUMBERS as u32 {
            assert_eq!(Phase::from_number(number).map(Phase::number), Some(number as usize));
        }
        assert_eq!(Phase::from_number(PHASE_NUMBERS as u32), None);
    }

    #[test]
    fn epochs_are_counted_and_not_their_beginnings() {
        let clock = Clock::new();
        assert_eq!(clock.epochs(), 0);
        for epoch in 0..12 {
            if epoch > 0 {
                clock.begin_epoch(); // the first epoch began before anybody could tell
            }
            (0..5).for_each(|_| _ = clock.end_step(0));
        }
        assert_eq!(clock.epochs(), 12);
        clock.begin_epoch();
        assert_eq!(clock.epochs(), 12, "nothing was done in it yet");
        let told = Clock::new();
        for _ in 0..12 {
            told.begin_epoch();
            (0..5).for_each(|_| _ = told.end_step(0));
        }
        assert_eq!(told.epochs(), 12);
    }

    #[test]
    fn forgets_epochs_without_steps_and_bounds_the_rest() {
        let clock = Clock::new();
        clock.begin_epoch();
        clock.begin_epoch();
        assert_eq!(clock.epoch_starts(), [EpochStart { epoch: 2, step: 0 }]);
        for step in 0..1000 {
            clock.end_step(step * 1_000_000);
            clock.begin_epoch();
        }
        assert_eq!(clock.epoch_starts().len(), REMEMBERED);
        assert!((clock.step_seconds().unwrap() - 0.001).abs() < 1e-9);
    }
}
