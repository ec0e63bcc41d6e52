//! The judge: at step boundaries, turns patterns into candidates, answers into findings, and takes findings
//! back that have settled.
//!
//! Must not know: who answers, how frames look, how reports are written.
//! Invariant: a look costs microseconds when nothing is suspicious; no finding is called before its candidate
//! could be explained, unless nobody answers; what the teardown after the last step frees changes nothing.

use super::accounts::Accounts;
use super::clock::Clock;
use super::findings::{Answer, Case, Finding, State};
use super::fragmentation;
use super::kept;
use super::pattern::{self, Class, Pattern, Shape, View};
use super::stage;
use super::told::{self, Told};
use hashbrown::HashMap;

/// Steps a candidate waits to be taken, the first time and once somebody has shown to answer.
const PATIENCE: u32 = 4;
const PATIENCE_KNOWN: u32 = 10;
/// Steps an answer may take after the candidate was taken.
const ANSWER: u32 = 16;
/// Sites looked at in one step, at least.
const BUDGET: usize = 256;
/// A burst matters when it is this share of what is live, or this large.
const ONE_OFF_SHARE: f64 = 0.05;
const ONE_OFF_BYTES: u64 = 64 << 20;
/// Candidates handed out at once, and cases of a finding that a new one is compared with.
const HANDED_OUT: usize = 48;
const COMPARED: usize = 8;
/// Steps for which what was taken back is not called again, at most.
const SILENT_MOST: u32 = 256;
/// How sure a rhythm must be where chance was called before.
const EXACT: f64 = 0.85;
/// Steps more that something must have stayed alone that was expected to come again.
const STILL_ALONE: u32 = 20;
/// A dismissed case is asked about again when it has grown this much.
const ASK_AGAIN: u64 = 4;

/// The judge of all devices of a process.
#[derive(Debug, Default)]
pub struct Judge {
    cases: Vec<Case>,
    by_site: HashMap<(i32, u32), usize, foldhash::fast::FixedState>,
    findings: Vec<Finding>,
    ids: u64,
    /// The newest step that ended.
    ended: u32,
    steps: u32,
    turn: usize,
    /// Somebody takes candidates.
    answered_before: bool,
    /// Never wait for an explanation (replayed runs).
    alone: bool,
    finished: bool,
    rooms: HashMap<i32, Room, foldhash::fast::FixedState>,
    stages: stage::Stages,
}

/// A device's memory and how much of it a step needs at most.
#[derive(Clone, Copy, Debug)]
struct Room {
    total: u64,
    used: u64,
}

impl Judge {
    pub fn new() -> Judge {
        Judge::default()
    }

    /// For runs that nobody explains (a replayed trace): findings are called at once.
    pub fn without_answers() -> Judge {
        Judge { alone: true, ..Judge::default() }
    }

    /// Looks at one device after its [`Accounts::boundary`]. Returns how many candidates wait.
    pub fn look(&mut self, accounts: &mut Accounts, clock: &Clock) -> usize {
        let Some(&(ended, point)) = accounts.books().last_point() else { return 0 };
        self.ended = self.ended.max(ended);
        self.steps = self.steps.max(ended.saturating_add(1));
        let sample = accounts.books().last_sample();
        if let Some(total) = sample.total {
            let used = point.peak.max(sample.allocated) + sample.outside;
            self.rooms.insert(accounts.device(), Room { total, used });
        }
        if !ended.is_multiple_of(cadence(ended)) {
            return self.waiting();
        }
        if !accounts.watched().is_empty() || !self.cases.is_empty() {
            let epochs = clock.epoch_starts();
            let (books, sites, open_since) = (accounts.books(), accounts.sites(), clock.open_since());
            let view = View { ended, epochs: &epochs, books, sites, open_since };
            self.refresh(accounts, &view);
            self.search(accounts, &view);
            self.weigh(accounts, &view);
            let live = accounts.live_bytes();
            let known = &self.by_site;
            let device = accounts.device();
            accounts.rewatch(|number, site| {
                known.contains_key(&(device, number)) || site.deserves_a_look(ended, live)
            });
        }
        if ended.is_multiple_of(8) {
            self.judge_fragmentation(accounts);
        }
        self.give_up();
        self.resolve();
        self.lead();
        self.withdraw();
        self.waiting()
    }

    /// Brings known cases of a device up to date.
    fn refresh(&mut self, accounts: &Accounts, view: &View) {
        for (at, case) in
            self.cases.iter_mut().enumerate().filter(|(_, case)| case.device == accounts.device())
        {
            let Some(site) = accounts.site(case.site) else { continue };
            case.holds(kept::held(site, &case.pattern, view.ended));
            case.keyless |= case.has_no_keys();
            if let State::Called(finding) = case.state {
                let finding = &mut self.findings[finding];
                finding.keyless |= case.keyless;
                case.keyless = finding.keyless;
            }
            case.most_bytes = case.most_bytes.max(case.live_bytes);
            if matches!(case.state, State::Weighing) {
                continue;
            }
            if let State::Withdrawn { finding, measure, step } = case.state {
                // It only paused: two more events, and more of it than ever.
                let again = site.cohorts.iter().filter(|c| c.first > step).count();
                if again >= 2
                    && view.ended - step >= case.silence(step)
                    && case.measure() > measure
                    && stage::settled(site, case, view, &mut self.stages).is_none()
                {
                    case.state = State::Called(finding);
                    case.settled = None;
                    let found = &mut self.findings[finding];
                    if found.withdrawn.take().is_some() {
                        found.cases.clear();
                        // Said to be taken back: then it is said anew.
                        found.fresh |= std::mem::take(&mut found.taken_back);
                    }
                    found.cases.push(at);
                }
            }
            case.most = case.most.max(case.measure());
            let again = (view.ended / cadence(view.ended) + case.site).is_multiple_of(4);
            if again
                && matches!(case.state, State::Called(_))
                && let Some(pattern) = pattern::recognise(site, view)
            {
                // A rhythm that was called is never demoted to a single burst by merged cohorts.
                let demoted = pattern.shape == Shape::Burst && case.pattern.shape != Shape::Burst;
                // Nor does chance become a rhythm because some of its gaps are alike.
                let by_chance = case.pattern.shape == Shape::Irregular
                    && pattern.shape == (Shape::Periodic { by_epoch: false })
                    && pattern.strength < EXACT;
                if !demoted && !by_chance {
                    if (pattern.shape == Shape::Regrow) != (case.pattern.shape == Shape::Regrow) {
                        case.most = 0;
                    }
                    let first = case.pattern.first.min(pattern.first);
                    case.pattern = Pattern { first, ..pattern };
                    case.holds(kept::held(site, &case.pattern, view.ended));
                    case.most = case.most.max(case.measure());
                }
            }
            // A fall is seen at once, anything slower within four looks.
            if case.is_open() && (again || case.settled.is_some() || case.measure() * 2 < case.most) {
                case.settled = stage::settled(site, case, view, &mut self.stages);
            }
        }
    }

    /// Looks for patterns in the watched sites.
    fn search(&mut self, accounts: &Accounts, view: &View) {
        let watched = accounts.watched();
        let budget = BUDGET.max(watched.len() / 8).min(watched.len());
        for offset in 0..budget {
            let number = watched[(self.turn + offset) % watched.len()];
            let Some(site) = accounts.site(number) else { continue };
            let key = (accounts.device(), number);
            let known = self.by_site.get(&key).copied();
            if known.is_some_and(|at| self.cases[at].is_open()) {
                continue;
            }
            let Some(pattern) = pattern::recognise(site, view) else { continue };
            let state =
                if pattern.shape == Shape::Burst { State::Weighing } else { State::Waiting(view.ended) };
            let held = kept::held(site, &pattern, view.ended);
            let fresh = Case {
                id: self.ids + 1,
                device: accounts.device(),
                site: number,
                stack: site.stack,
                pattern,
                state,
                since: view.ended,
                live_bytes: held.bytes,
                live_blocks: held.blocks,
                asked: known.map_or(0, |at| self.cases[at].asked + 1),
                retreats: known.map_or(0, |at| self.cases[at].retreats),
                most: 0,
                most_bytes: held.bytes,
                over: None,
                settled: None,
                thins: None,
                answer: None,
                keyless: false,
            };
            let fresh = Case { most: fresh.measure(), ..fresh };
            if !stage::grows(site, &fresh, view) {
                continue;
            }
            match known {
                Some(at) if self.cases[at].asks_again(&fresh) => {
                    self.ids += 1;
                    self.cases[at] = fresh;
                }
                Some(_) => {}
                None => {
                    self.ids += 1;
                    self.by_site.insert(key, self.cases.len());
                    self.cases.push(fresh);
                }
            }
        }
        self.turn = self.turn.wrapping_add(budget);
    }

    /// Judges bursts of the same time together: whether they are large enough, and added to what is live
    /// rather than replaced it.
    fn weigh(&mut self, accounts: &Accounts, view: &View) {
        let weighing: Vec<usize> = (0..self.cases.len())
            .filter(|&at| {
                self.cases[at].state == State::Weighing && self.cases[at].device == accounts.device()
            })
            .collect();
        for &at in &weighing {
            let (first, last) = (self.cases[at].pattern.first, self.cases[at].pattern.last);
            let bytes: u64 = weighing
                .iter()
                .map(|&other| &self.cases[other].pattern)
                .filter(|other| other.first.abs_diff(first) <= 2)
                .map(|other| other.bytes)
                .sum();
            let live = accounts.live_bytes();
            let large = bytes >= ONE_OFF_BYTES || bytes as f64 >= ONE_OFF_SHARE * live as f64;
            let before = first.checked_sub(1).and_then(|step| view.books.mature_at(step));
            let added = match (before, view.books.mature_at(last + pattern::MATURE)) {
                (Some(before), Some(after)) => after.saturating_sub(before) * 2 >= bytes,
                _ => true,
            };
            self.cases[at].state = if large && added {
                State::Waiting(view.ended)
            } else {
                let reason = if large { "replaced what was freed at the same time" } else { "" };
                self.cases[at].dismissed(reason, view.ended)
            };
        }
    }

    fn judge_fragmentation(&mut self, accounts: &Accounts) {
        let device = accounts.device();
        let known = self.findings.iter().position(|f| f.class == Class::Fragmentation && f.device == device);
        let seen = fragmentation::recognise(accounts.books());
        match (known, seen) {
            (Some(at), Some(seen)) => {
                self.findings[at].fragmentation = Some(seen);
                self.findings[at].withdrawn = None;
            }
            (Some(at), None) => {
                let sample = accounts.books().last_sample();
                if sample.reserved < sample.allocated.saturating_mul(5) / 4 {
                    self.findings[at].withdrawn = Some("reserved memory fell back".to_owned());
                }
            }
            (None, Some(seen)) => {
                self.ids += 1;
                self.findings.push(Finding {
                    id: self.ids,
                    class: Class::Fragmentation,
                    cases: Vec::new(),
                    device,
                    called_at_step: self.steps,
                    withdrawn: None,
                    keyless: false,
                    fresh: true,
                    told: None,
                    taken_back: false,
                    fragmentation: Some(seen),
                });
            }
            (None, None) => {}
        }
    }

    /// Candidates that nobody explains are called without a holder.
    fn give_up(&mut self) {
        let (ended, finished, alone) = (self.ended, self.finished, self.alone);
        let patience = if self.answered_before { PATIENCE_KNOWN } else { PATIENCE };
        for case in &mut self.cases {
            let over = match case.state {
                State::Waiting(step) => alone || ended - step >= patience,
                State::Asked(step) => ended - step >= ANSWER,
                _ => false,
            };
            if case.settled.is_some() && matches!(case.state, State::Waiting(_) | State::Asked(_)) {
                let settled = case.settled.clone().filter(|_| case.thins.is_some());
                let why = settled.unwrap_or_else(|| "it settled before it was called".to_owned());
                case.state = case.dismissed(&why, ended);
            } else if over || finished && matches!(case.state, State::Waiting(_) | State::Asked(_)) {
                case.state = State::Answered(ended);
            }
        }
    }

    /// Calls what is answered, once no candidate of the same batch is still out.
    fn resolve(&mut self) {
        let out = self.cases.iter().any(|case| matches!(case.state, State::Asked(_)));
        let mut ready: Vec<usize> = (0..self.cases.len())
            .filter(|&at| match self.cases[at].state {
                State::Answered(step) => !out || self.finished || self.ended - step >= PATIENCE,
                _ => false,
            })
            .collect();
        if ready.is_empty() {
            return;
        }
        ready.sort_by_key(|&at| {
            let case = &self.cases[at];
            (!case.names_a_holder(), case.group().is_none(), std::cmp::Reverse(case.live_bytes))
        });
        for at in ready {
            if let Some(reason) = self.acquits(&self.cases[at]) {
                self.cases[at].state = self.cases[at].dismissed(&reason, self.ended);
                continue;
            }
            let joined = (0..self.findings.len()).find(|&finding| {
                let finding = &self.findings[finding];
                finding.is_open()
                    && finding
                        .cases
                        .iter()
                        .take(COMPARED)
                        .any(|&other| self.cases[other].same_cause(&self.cases[at]))
            });
            let finding = joined.unwrap_or_else(|| {
                self.ids += 1;
                self.findings.push(Finding {
                    id: self.ids,
                    class: self.cases[at].pattern.class,
                    cases: Vec::new(),
                    device: self.cases[at].device,
                    called_at_step: self.steps,
                    withdrawn: None,
                    keyless: false,
                    fresh: true,
                    told: None,
                    taken_back: false,
                    fragmentation: None,
                });
                self.findings.len() - 1
            });
            self.cases[at].state = State::Called(finding);
            self.findings[finding].cases.push(at);
        }
        self.lead();
    }

    /// The case with the most bytes leads its finding and gives it its class.
    fn lead(&mut self) {
        for finding in self.findings.iter_mut().filter(|finding| finding.is_open()) {
            let cases = &self.cases;
            finding
                .cases
                .sort_by_key(|&at| (cases[at].settled.is_some(), std::cmp::Reverse(cases[at].live_bytes)));
            if let Some(&first) = finding.cases.first() {
                finding.class = cases[first].pattern.class;
                finding.device = cases[first].device;
            }
        }
    }

    /// Why an answered case is no finding.
    fn acquits(&self, case: &Case) -> Option<String> {
        let answer = case.answer.as_ref()?;
        if let Some(bounded) = answer.bounded.filter(|bounded| bounded.length > 0) {
            let full = case.live_bytes as f64 * bounded.capacity as f64 / bounded.length as f64;
            if self.rooms.get(&case.device).is_some_and(|room| full > 0.9 * room.total as f64) {
                return None; // its bound lies beyond the device's memory
            }
        }
        // A bound alone acquits nobody: who answers has seen it, and may know why it does not help.
        if let Some(reason) = &answer.not_a_leak {
            return Some(reason.clone());
        }
        let unheld = case.pattern.class == Class::OneOff && !answer.names_a_holder();
        (unheld && case.live_bytes < ONE_OFF_BYTES)
            .then(|| "allocated once and kept by a library, not by Python".to_owned())
    }

    /// Takes back findings of which nothing grows any more.
    fn withdraw(&mut self) {
        for at in 0..self.findings.len() {
            let finding = &self.findings[at];
            if !finding.is_open() || finding.cases.is_empty() {
                continue;
            }
            let weight = |settled: bool| -> u64 {
                let of = finding.cases.iter().map(|&case| &self.cases[case]);
                of.filter(|case| !settled || case.settled.is_some()).map(|case| case.most.max(1)).sum()
            };
            if weight(true) * 10 < weight(false) * 8 {
                continue;
            }
            let word = finding.cases.iter().find_map(|&case| self.cases[case].settled.clone());
            let cases = finding.cases.clone();
            self.findings[at].withdrawn = word;
            for case in cases {
                let measure = self.cases[case].most;
                self.cases[case].retreats += 1;
                self.cases[case].state = State::Withdrawn { finding: at, measure, step: self.ended };
            }
        }
    }

    /// How many candidates wait to be taken.
    pub fn waiting(&self) -> usize {
        self.cases.iter().filter(|case| matches!(case.state, State::Waiting(_))).count()
    }

    /// Hands out the candidates that nobody has explained yet, largest first, and counts them as asked.
    pub fn take_candidates(&mut self) -> Vec<Case> {
        self.answered_before = true;
        let ended = self.ended;
        let mut taken: Vec<usize> = (0..self.cases.len())
            .filter(|&at| matches!(self.cases[at].state, State::Waiting(_) | State::Asked(_)))
            .collect();
        taken.sort_by_key(|&at| std::cmp::Reverse(self.cases[at].live_bytes));
        taken.truncate(HANDED_OUT);
        for &at in &taken {
            if matches!(self.cases[at].state, State::Waiting(_)) {
                self.cases[at].state = State::Asked(ended);
            }
        }
        taken.into_iter().map(|at| self.cases[at].clone()).collect()
    }

    /// Answers a candidate. False when no candidate has this id (any more).
    pub fn explain(&mut self, id: u64, answer: Answer) -> bool {
        let ended = self.ended;
        let Some(case) = self.cases.iter_mut().find(|case| case.id == id) else { return false };
        match case.state {
            State::Waiting(_) | State::Asked(_) | State::Answered(_) => case.state = State::Answered(ended),
            // A late answer still names the holder.
            State::Called(_) if answer.not_a_leak.is_none() => {}
            State::Called(finding) => {
                let reason = answer.not_a_leak.clone().unwrap_or_default();
                case.state = case.dismissed(&reason, ended);
                case.answer = Some(answer);
                let cases = &self.cases;
                self.findings[finding].cases.retain(|&at| cases[at].id != id);
                if self.findings[finding].cases.is_empty() {
                    self.findings[finding].withdrawn = Some(reason);
                }
                return true;
            }
            _ => return false,
        }
        case.answer = Some(answer);
        self.resolve();
        true
    }

    /// The job is over: what is still waiting is called as it stands. Judges by the last step boundary.
    pub fn finish(&mut self) {
        self.finished = true;
        self.give_up();
        self.resolve();
    }

    /// Findings called since the last call of this function.
    pub fn take_new_findings(&mut self) -> Vec<Finding> {
        let fresh = self.findings.iter_mut().filter(|finding| finding.fresh && finding.withdrawn.is_none());
        fresh
            .map(|finding| {
                finding.fresh = false;
                finding.note_told(&self.cases, self.ended);
                finding.clone()
            })
            .collect()
    }

    /// Findings handed out before that must be said anew, with what was said of them.
    pub fn take_changed(&mut self) -> Vec<(Finding, Told)> {
        told::changed(&mut self.findings, &self.cases, self.ended, self.finished)
    }

    /// Findings that were handed out by [`Self::take_new_findings`] and withdrawn since the last call of this
    /// function.
    pub fn take_withdrawn(&mut self) -> Vec<Finding> {
        let gone = self
            .findings
            .iter_mut()
            .filter(|found| !found.fresh && !found.taken_back && found.withdrawn.is_some());
        gone.map(|found| {
            found.taken_back = true;
            found.clone()
        })
        .collect()
    }

    /// Every finding ever called, withdrawn ones too.
    pub fn findings(&self) -> &[Finding] {
        &self.findings
    }

    pub fn cases(&self) -> &[Case] {
        &self.cases
    }

    /// Steps completed.
    pub fn steps(&self) -> u32 {
        self.steps
    }

    /// Bytes of a device that no step has needed yet, when its memory is known.
    pub fn room(&self, device: i32) -> Option<u64> {
        self.rooms.get(&device).map(|room| room.total.saturating_sub(room.used))
    }

    /// The sites of a device that findings are about: what a report must copy besides the largest.
    pub fn wanted(&self, device: i32) -> Vec<u32> {
        let called =
            self.cases.iter().filter(|case| matches!(case.state, State::Called(_)) && case.device == device);
        let fragmented = self.findings.iter().filter(|finding| finding.device == device);
        called
            .map(|case| case.site)
            .chain(fragmented.filter_map(|finding| finding.fragmentation.and_then(|seen| seen.site)))
            .collect()
    }
}

/// Steps between two looks.
fn cadence(ended: u32) -> u32 {
    (ended / 512).clamp(1, 4)
}

impl Case {
    fn holds(&mut self, held: kept::Held) {
        (self.live_blocks, self.live_bytes) = (held.blocks, held.bytes);
    }

    /// Steps for which it is not called again after it was taken back in `step`: the longer it was watched, and the
    /// more often it was taken back, the longer, so that nobody is told the same again and again.
    fn silence(&self, step: u32) -> u32 {
        (step.saturating_sub(self.pattern.first) / 2 * self.retreats).min(SILENT_MOST)
    }

    fn dismissed(&self, reason: &str, step: u32) -> State {
        State::Dismissed { reason: reason.to_owned(), measure: self.measure(), step }
    }

    /// Whether a closed case is worth another look, given what its site shows now.
    fn asks_again(&self, fresh: &Case) -> bool {
        match &self.state {
            // What thins out is called again where its pace holds, however much it grows.
            State::Withdrawn { measure, .. } => self.thins.is_none() && fresh.measure() * 2 > measure * 3,
            State::Dismissed { measure, step, .. } => {
                let bound = self.answer.as_ref().and_then(|answer| answer.bounded);
                let room = bound.map_or(ASK_AGAIN, |b| (2 * b.capacity / b.length.max(1)).max(ASK_AGAIN));
                // A burst that was too small says nothing about what the site does later.
                let burst = self.pattern.shape == Shape::Burst && fresh.pattern.shape != Shape::Burst;
                // What was to come again and did not, in the time that its first took to come.
                let alone = self.may_come_again()
                    && fresh.pattern.shape == Shape::Burst
                    && fresh.since > 2 * fresh.pattern.last + STILL_ALONE;
                burst
                    || alone
                    || fresh.measure() >= measure * room
                    || self.settled.is_some() && fresh.since > step + 20
            }
            _ => false,
        }
    }
}
