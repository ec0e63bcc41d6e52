//! What can be written of a run while a crashed thread holds who knows which lock.
//!
//! Every lock is tried, for a while that is short against the handler's limit; what hangs on one that is not to be had
//! is left out, and the report says so. A lock that was to be had once is not taken by the crashed thread any more,
//! which waits. Must not know signals. Invariants: nothing is waited for without a limit, but for the allocator's and
//! the loader's own locks, which the handler's limit is for; no Python; the end of the run is told once.

use super::handler::Crash;
use crate::attach::gpu::Gpus;
use crate::attach::outcome::{Reason, from_here};
use crate::attach::process::{Stacks, State};
use crate::attach::{control, say, served, siblings, signal, voice};
use crate::ledger::{Clock, Frame, Judge, Symbols};
use crate::report::model::{self, Remark};
use crate::report::{self, Report};
use crate::stacks;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How long a report that is being written is waited for …
const ANOTHER_REPORT: Duration = Duration::from_millis(1000);
/// … and any other lock.
const PATIENCE: Duration = Duration::from_millis(250);

const NOT_SEARCHED: &str = "unknown: the job crashed before it was looked for";
const FIX: &str =
    "look for what keeps the blocks that this line allocates; a run that does not crash names it";

/// Symbols where the names of stacks are not to be had.
struct NoNames;

impl Symbols for NoNames {
    fn frames(&self, _stack: u32) -> Vec<Frame> {
        Vec::new()
    }

    fn allocated_at(&self, _stack: u32) -> Option<Frame> {
        None
    }
}

impl State {
    /// Writes the report of a crash, and says where it is.
    pub(super) fn crashed(&self, crash: &Crash) {
        served::hurry();
        let mut left_out = Vec::new();
        // Files are written aside, each under a name of its own: two reports at a time do each other no harm.
        let writing = self.outcome.writing.try_lock_for(ANOTHER_REPORT);
        if self.outcome.told.load(Ordering::SeqCst) {
            return;
        }
        if writing.is_none() {
            left_out.push("what a report that was just being written would have told".to_owned());
        }
        let did_little = self.did_little(self.clock.now().step);
        let (out, folder) = (&self.outcome.out, &self.outcome.folder);
        if did_little && (!self.outcome.main || siblings::have_reported(out, Some(folder)).unwrap_or(false)) {
            return; // a worker, or a launcher whose ranks have told what there is to tell
        }
        let (report, fresh) = self.report_of(crash, left_out);
        let written = self.write_files(&report, folder);
        let quiet = self.options.quiet;
        if !quiet {
            let told = report.findings.iter().filter(|finding| fresh.contains(&finding.id));
            told.for_each(|finding| voice::tell(&report::text::finding(finding, self.outcome.colour)));
        }
        match written {
            Ok(_) if quiet => {}
            Ok(_) => say(format_args!(
                "crash ({}): {}: {}; report: {}",
                crash.name(),
                report.verdict.name(),
                report.reason,
                from_here(&folder.join("report.html")).display()
            )),
            Err(error) => say(format_args!("crash ({}): no report: {error}", crash.name())),
        }
        self.save_metrics(&report);
        control::server::stop();
    }

    /// The devices that a whole report has.
    fn devices(&self) -> Vec<i32> {
        let host = self.host.iter().map(served::Served::device);
        let open = self.gpus.into_iter().flat_map(Gpus::open).map(served::Served::device);
        host.chain(open)
            .chain(self.gpus.into_iter().flat_map(Gpus::seen).map(|watched| watched.device()))
            .collect()
    }

    /// The report, and the numbers of the findings that were not told before.
    fn report_of(&self, crash: &Crash, mut left_out: Vec<String>) -> (Report, Vec<u64>) {
        let mut without = |had: bool, what: &str| {
            if !had {
                left_out.push(what.to_owned());
            }
            had
        };
        let mut judge = self.judge.try_lock_for(2 * PATIENCE);
        without(judge.is_some(), "findings");
        let mut fresh = self.outcome.news.untold(PATIENCE);
        if let Some(judge) = judge.as_mut() {
            judge.finish();
            fresh.extend(judge.take_new_findings().iter().map(|found| found.id));
        }
        let nobody = Judge::new();
        let judge: &Judge = judge.as_deref().unwrap_or(&nobody);
        let spare = Clock::new();
        let clock = if without(self.clock.answers(PATIENCE), "epochs, validations and the duration of steps")
        {
            self.clock
        } else {
            &spare
        };
        let named = without(stacks::answers(PATIENCE), "the names of call stacks");
        let symbols: &dyn Symbols = if named { &Stacks } else { &NoNames };
        if !without(native_names_can_be_had(), "the names of native frames") {
            stacks::leave_native_unnamed();
        }
        if let (Some(guard), Some(host)) = (&self.guard, &self.host)
            && without(named && guard.answers(PATIENCE), "what the guard would have found at last")
        {
            guard.look_at_all(host);
        }
        if let Some(faults) = self.faults() {
            without(faults.answers(PATIENCE), "guard.json");
        }
        let mut parts = self.parts(&|device| judge.wanted(device), clock);
        for device in self.devices() {
            let had = parts.iter().any(|part| part.view.device.device == i64::from(device));
            without(had, &format!("device {device} (-1 is the host)"));
        }
        let note = self.host_memory.try_lock_for(PATIENCE);
        without(note.is_some(), "the process's own memory");
        if let (Some(part), Some(note)) = (parts.first_mut(), note.and_then(|memory| memory.note())) {
            part.view.notes.push(note);
        }
        let known = self.remarks.try_lock_for(PATIENCE).map(|remarks| remarks.clone());
        without(known.is_some(), "earlier remarks");
        let mut run = self.run(Reason::Crash, clock);
        run.steps = self.clock.now().step.into();
        let crash = described(crash, left_out);
        let mut remarks = vec![remark(&crash)];
        remarks.extend(known.unwrap_or_default());
        run.crash = Some(crash);
        let mut report = report::assemble(run, parts, judge, clock, symbols).with_remarks(remarks);
        for finding in report.findings.iter_mut().filter(|finding| finding.held_by.is_none()) {
            let found = judge.findings().iter().find(|found| found.id == finding.id);
            let searched = |at: &usize| judge.cases()[*at].answer.is_some();
            if found.is_some_and(|found| !found.cases.is_empty() && !found.cases.iter().any(searched)) {
                finding.holder_note = NOT_SEARCHED.to_owned();
                finding.fix = FIX.to_owned();
            }
        }
        (report, fresh)
    }
}

/// Whether the symbols of native frames can be had: the loader's lock is among what they need, which a thread holds that
/// crashes while a library is loaded. Another thread tries.
fn native_names_can_be_had() -> bool {
    // No channel: waiting for one needs a thread-local, which the loader's lock is taken for as well.
    let (answer, mut left) = (Arc::new(AtomicBool::new(false)), 2 * PATIENCE);
    let answered = answer.clone();
    signal::submit(Box::new(move || {
        // SAFETY: an all-zero Dl_info is valid; the address is that of a function here.
        unsafe {
            let mut info: libc::Dl_info = std::mem::zeroed();
            libc::dladdr(native_names_can_be_had as *const libc::c_void, &raw mut info);
        }
        answer.store(true, Ordering::Release);
    }));
    while !answered.load(Ordering::Acquire) && !left.is_zero() {
        let pause = left.min(Duration::from_millis(2));
        std::thread::sleep(pause);
        left -= pause;
    }
    answered.load(Ordering::Acquire) && stacks::native_answers(PATIENCE)
}

fn described(crash: &Crash, left_out: Vec<String>) -> model::Crash {
    let name = std::fs::read_to_string(format!("/proc/self/task/{}/comm", crash.thread));
    model::Crash {
        signal: crash.name().to_owned(),
        thread: crash.thread.unsigned_abs(),
        thread_name: name.map(|name| name.trim_end().to_owned()).unwrap_or_default(),
        address: crash.address().map(|address| format!("{address:#x}")),
        sent_by: crash.sent_by(),
        left_out,
    }
}

/// The crash in words, for those who read the report.
fn remark(crash: &model::Crash) -> Remark {
    let how = match (&crash.address, crash.sent_by) {
        (Some(address), _) => format!(" at address {address}"),
        (_, Some(sender)) => format!(", sent by process {sender}"),
        _ => String::new(),
    };
    let missing = if crash.left_out.is_empty() {
        "all of the report is there".to_owned()
    } else {
        format!("it could not have {}, which the crashed thread holds", crash.left_out.join("; "))
    };
    Remark {
        kind: "crash".to_owned(),
        what: format!(
            "the job crashed: {}{how}, in thread {} ({})",
            crash.signal, crash.thread, crash.thread_name
        ),
        because: format!(
            "this report was written while the crashed thread waited, without Python: {missing}; who holds what leaks \
             was not looked for any more"
        ),
        fix: String::new(),
    }
}
