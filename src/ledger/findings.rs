//! Cases (sites under suspicion), the answers that explain them, and findings (cases with one holder).
//!
//! Must not know: how suspicion arises.
//! Invariant: a case belongs to at most one open finding.

use super::pattern::{Class, Pattern, Shape};
use super::told::Told;
use serde::{Deserialize, Serialize};

/// The chain of references that keeps a block alive.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    pub path: String,
    #[serde(default)]
    pub kind: String,
}

/// The source line that stores the reference.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kept {
    pub file: String,
    pub line: u32,
    #[serde(default)]
    pub code: String,
}

/// A container with a bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bounded {
    pub length: u64,
    pub capacity: u64,
}

/// How what is kept is used: never; read some time; read after all of it was gathered; read again and again,
/// elsewhere than where it is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Use {
    Never,
    Read,
    Gathered,
    Again,
}

/// What the Python side answers to a candidate (strandline.h). Every key may be missing.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Answer {
    pub held_by: Option<Holder>,
    pub kept_at: Option<Kept>,
    pub fix: Option<String>,
    pub released_by: Option<String>,
    pub not_a_leak: Option<String>,
    /// The heading of that reason in docs/findings.md.
    pub reason: Option<String>,
    pub bounded: Option<Bounded>,
    /// What the program does with what is kept, as far as its source shows; None where it shows nothing (a library
    /// keeps it, a cycle, the search ran out of time), which is not the same as never.
    pub used: Option<Use>,
    /// What is kept comes under keys that never come again, or is never looked for: so it is no cache that fills.
    pub keyless: bool,
    /// The object whose parts several containers are: neighbouring lines that fill them are one cause.
    pub owner: Option<String>,
    pub group: Option<String>,
    pub seconds: Option<f64>,
}

impl Answer {
    /// Whether somebody is named, which "held by C++, or by a running statement" does not.
    pub fn names_a_holder(&self) -> bool {
        let named = |holder: &Holder| !holder.path.is_empty() && !NOBODY.contains(&holder.kind.as_str());
        self.held_by.as_ref().is_some_and(named) || self.kept_at.is_some()
    }

    fn group(&self) -> Option<&str> {
        self.group.as_deref().filter(|group| !group.is_empty())
    }
}

/// Kinds of holders that stand for "no Python object".
const NOBODY: [&str; 2] = ["stack", "c++"];

/// The reason of an answer that a single event says nothing yet: more of them are to come.
const MORE_TO_COME: &str = "more-to-come";

/// Kinds of holders without keys.
const KEYLESS: [&str; 3] = ["list", "deque", "exception"];

/// Lines that keep blocks in the same rhythm and lie this near are one cause.
const NEXT_LINE: u32 = 2;

/// Where a case stands. Numbers are steps.
#[derive(Clone, Debug, PartialEq)]
pub enum State {
    /// A burst whose weight is to be judged together with its neighbours'.
    Weighing,
    /// Waits to be taken by [`super::Judge::take_candidates`].
    Waiting(u32),
    /// Taken, not answered yet.
    Asked(u32),
    /// Answered (or given up on), not yet called.
    Answered(u32),
    /// Part of the finding with this index.
    Called(usize),
    /// Explained as no leak, at this measure.
    Dismissed { reason: String, measure: u64, step: u32 },
    /// Was called, then settled or was freed.
    Withdrawn { finding: usize, measure: u64, step: u32 },
}

/// One site under suspicion.
#[derive(Clone, Debug)]
pub struct Case {
    pub id: u64,
    pub device: i32,
    pub site: u32,
    pub stack: u32,
    pub pattern: Pattern,
    pub state: State,
    /// The step at which it was first suspected.
    pub since: u32,
    /// Live at the last boundary that was judged.
    pub live_bytes: u64,
    pub live_blocks: u64,
    /// How often this site's growth was explained away before.
    pub asked: u32,
    /// How often a finding of it was taken back.
    pub(super) retreats: u32,
    /// The most blocks (bytes where one block regrows) since it was suspected.
    pub most: u64,
    pub settled: Option<String>,
    /// New blocks become ever rarer: events in the first half of its time, and in the second. Then nobody can say
    /// whether it goes on.
    pub thins: Option<[u32; 2]>,
    /// The most live bytes so far.
    pub most_bytes: u64,
    /// The step in which the stage of the program ended that made it grow.
    pub over: Option<u32>,
    pub answer: Option<Answer>,
    /// It, or another case of its finding, is kept in what has no keys.
    pub(super) keyless: bool,
}

impl Case {
    /// What growth of this case is measured in: blocks, or bytes where one block regrows.
    pub fn measure(&self) -> u64 {
        if self.pattern.shape == Shape::Regrow { self.live_bytes } else { self.live_blocks }
    }

    pub fn is_open(&self) -> bool {
        !matches!(self.state, State::Dismissed { .. } | State::Withdrawn { .. })
    }

    pub(super) fn group(&self) -> Option<&str> {
        self.answer.as_ref().and_then(Answer::group)
    }

    /// Whether it is kept in what has no keys, so that nothing of it can be found again instead of being made anew.
    pub(super) fn has_no_keys(&self) -> bool {
        let holder = self.answer.as_ref().and_then(|answer| answer.held_by.as_ref());
        holder.is_some_and(|holder| KEYLESS.contains(&holder.kind.as_str()))
            || self.answer.as_ref().is_some_and(|answer| answer.keyless)
    }

    fn kept(&self) -> Option<(&str, u32)> {
        let kept = self.answer.as_ref()?.kept_at.as_ref()?;
        Some((kept.file.as_str(), kept.line))
    }

    pub(super) fn used(&self) -> Option<Use> {
        self.answer.as_ref().and_then(|answer| answer.used)
    }

    fn owner(&self) -> Option<&str> {
        self.answer.as_ref()?.owner.as_deref().filter(|owner| !owner.is_empty())
    }

    /// Whether it was put off because the line that keeps it runs again and again.
    pub fn may_come_again(&self) -> bool {
        self.answer.as_ref().is_some_and(|answer| answer.reason.as_deref() == Some(MORE_TO_COME))
    }

    pub(super) fn names_a_holder(&self) -> bool {
        self.answer.as_ref().is_some_and(Answer::names_a_holder)
    }

    /// Whether two cases have one cause: one holder, one line that keeps them, or the same rhythm where at
    /// least one of them has no holder (irregular rhythms do not coincide by chance: there the holder does
    /// not matter).
    pub(super) fn same_cause(&self, other: &Case) -> bool {
        if self.group().is_some() && self.group() == other.group() {
            return true;
        }
        if self.kept().is_some() && self.kept() == other.kept() {
            return true;
        }
        if !self.same_rhythm(other) {
            return false;
        }
        // `self.preds.append(p)` and, in the next line, `self.targets.append(t)`: one container of results, two
        // lists. Two lists that have nothing to do with each other stay two, however near their lines are.
        if self.owner().is_some()
            && self.owner() == other.owner()
            && let (Some(mine), Some(theirs)) = (self.kept(), other.kept())
            && mine.0 == theirs.0
            && mine.1.abs_diff(theirs.1) <= NEXT_LINE
        {
            return true;
        }
        let telling = matches!(self.pattern.class, Class::Sporadic | Class::OneOff);
        telling || !self.names_a_holder() || !other.names_a_holder()
    }

    fn same_rhythm(&self, other: &Case) -> bool {
        let (mine, theirs) = (&self.pattern, &other.pattern);
        if mine.class != theirs.class {
            return false;
        }
        if (mine.shape == Shape::Regrow) != (theirs.shape == Shape::Regrow) {
            return false;
        }
        let (short, long) = if mine.births.len() <= theirs.births.len() {
            (&mine.births, &theirs.births)
        } else {
            (&theirs.births, &mine.births)
        };
        let common = short.iter().filter(|step| long.iter().any(|other| other.abs_diff(**step) <= 1)).count();
        common * 5 >= short.len() * 4
    }
}

/// Cases with one cause, called.
#[derive(Clone, Debug)]
pub struct Finding {
    pub id: u64,
    pub class: Class,
    /// Indices of its cases, the leading one first.
    pub cases: Vec<usize>,
    pub device: i32,
    /// Steps completed when it was called.
    pub called_at_step: u32,
    /// Why it no longer stands.
    pub withdrawn: Option<String>,
    /// One of its cases is kept in what has no keys.
    pub(super) keyless: bool,
    /// Not yet handed out by [`super::Judge::take_new_findings`].
    pub(super) fresh: bool,
    /// What was said of it last.
    pub(super) told: Option<Told>,
    /// Handed out by [`super::Judge::take_withdrawn`].
    pub(super) taken_back: bool,
    /// Fragmentation has no case, but a measure of its own.
    pub fragmentation: Option<super::fragmentation::Fragmentation>,
}

impl Finding {
    pub fn is_open(&self) -> bool {
        self.withdrawn.is_none()
    }
}
