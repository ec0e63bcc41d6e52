//! What is told while the job runs: findings when they are new, changed or taken back.
//!
//! A thread of the job only notes that there is something to tell. Our own looks up the names of native frames
//! (the first time, that reads files: a tenth of a second and more), tells it, and writes a report that has it.
//! Must not know how events arise. Invariants: what is noted is told, at the end at the latest; no lock that a
//! thread of the job may want is held while a name is looked up for the first time.

use super::outcome::Reason;
use super::process::{Stacks, State};
use super::{signal, voice};
use crate::ledger::{Finding, Frame, Symbols, Told};
use crate::report;
use parking_lot::Mutex;
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::time::Duration;

/// What the judge has said since it was asked last.
struct Noted {
    fresh: Vec<Finding>,
    changed: Vec<(Finding, Told)>,
    gone: Vec<Finding>,
}

/// What waits to be told.
#[derive(Default)]
pub struct News {
    noted: Mutex<Vec<Noted>>,
    /// Held by who tells.
    telling: Mutex<()>,
}

impl News {
    /// The numbers of the new findings that wait to be told, unless somebody holds them for longer than `patience`.
    pub(super) fn untold(&self, patience: Duration) -> Vec<u64> {
        let noted = self.noted.try_lock_for(patience);
        noted.iter().flat_map(|all| all.iter()).flat_map(|noted| &noted.fresh).map(|found| found.id).collect()
    }
}

/// Notes whose frames are wanted, and knows none.
#[derive(Default)]
struct Wanted(RefCell<BTreeSet<u32>>);

impl Symbols for Wanted {
    fn frames(&self, stack: u32) -> Vec<Frame> {
        self.0.borrow_mut().insert(stack);
        Vec::new()
    }
}

impl State {
    /// Has what is new told by our thread.
    pub(super) fn note_news(&self) {
        if self.take_news() && !signal::ask_to_tell() {
            self.tell_noted();
        }
    }

    /// Tells what is new, and what our thread has not told yet; waits until it has told the rest.
    pub(super) fn tell_news(&self) {
        self.take_news();
        self.tell_noted();
    }

    /// Whether the judge has something new, which is noted.
    fn take_news(&self) -> bool {
        let noted = {
            let mut judge = self.judge.lock();
            Noted {
                fresh: judge.take_new_findings(),
                changed: judge.take_changed(),
                gone: judge.take_withdrawn(),
            }
        };
        let is_new = !(noted.fresh.is_empty() && noted.changed.is_empty() && noted.gone.is_empty());
        if is_new {
            self.outcome.news.noted.lock().push(noted);
        }
        is_new
    }

    /// Tells what is noted.
    pub(super) fn tell_noted(&self) {
        let _one_at_a_time = self.outcome.news.telling.lock();
        let noted = std::mem::take(&mut *self.outcome.news.noted.lock());
        if noted.is_empty() {
            return;
        }
        self.look_up_names();
        noted.iter().for_each(|noted| self.tell_all(noted));
        if noted.iter().any(|noted| !(noted.fresh.is_empty() && noted.changed.is_empty())) {
            self.write(Reason::Finding, None);
        }
    }

    /// Looks up what a report needs, so that it is known when the report is written under the judge's lock.
    fn look_up_names(&self) {
        let wanted = Wanted::default();
        self.assemble_with(Reason::Finding, &wanted);
        for stack in wanted.0.into_inner() {
            Stacks.frames(stack);
        }
    }

    fn tell_all(&self, noted: &Noted) {
        if self.options.quiet {
            return;
        }
        let describe =
            |found: &Finding| report::describe::finding(&self.judge.lock(), found, &Stacks, self.clock);
        for found in &noted.gone {
            let because = found.withdrawn.as_deref().unwrap_or_default();
            voice::tell(&report::text::taken_back(&describe(found), because, self.outcome.colour));
        }
        let fresh = noted.fresh.iter().map(|found| (found, None));
        let changed = noted.changed.iter().map(|(found, told)| (found, Some(told.class)));
        for (found, was) in fresh.chain(changed) {
            let finding = describe(found);
            let focus = self.options.focus.as_deref();
            if focus.is_some_and(|library| !report::focus::concerns(&finding, library)) {
                continue;
            }
            let said = report::text::finding(&finding, self.outcome.colour);
            let before = was.map(|was| report::text::said_before(&finding, was));
            voice::tell(&(said + &before.unwrap_or_default()));
        }
    }
}
