//! What a report says besides findings: reasons, undecided growth, tables. Simulated programs.

mod ledger_sim;
use ledger_sim::*;
use strandline::ledger::Answer;
use strandline::report::text::{self, Colour};

const SITE: u32 = 900;
const ACT: u64 = 64 << 10;

fn kinds(job: &Job) -> Vec<String> {
    job.report().not_leaks.into_iter().map(|note| note.kind).collect()
}

#[test]
fn a_single_step_up_is_no_growing_input() {
    let mut job = Job::new(1);
    (0..60).for_each(|_| job.train(ACT));
    (0..60).for_each(|_| job.train(2 * ACT));
    assert!(!kinds(&job).contains(&"growing-input".to_owned()), "{:?}", job.report().not_leaks);
}

#[test]
fn the_largest_input_so_far_is_named_and_a_leak_is_not_taken_for_one() {
    let mut job = Job::new(1);
    for step in 0..100 {
        job.train(if step == 50 { 40 * ACT } else { ACT });
    }
    let note = job.report().not_leaks.into_iter().find(|note| note.kind == "largest-input").unwrap();
    assert!(note.what.contains("step 50"), "{note:?}");
    let mut leak = Job::new(1);
    for _ in 0..100 {
        leak.leak(SITE, 1 << 20);
        leak.train(ACT);
    }
    let said = kinds(&leak);
    assert!(!said.iter().any(|kind| kind == "largest-input" || kind == "warm-up-peak"), "{said:?}");
}

#[test]
fn what_the_collector_frees_is_said_to_be_cycles() {
    let mut job = Job::new(1);
    let mut garbage = Vec::new();
    for step in 0..120 {
        garbage.push(job.alloc(SITE, 1 << 20));
        if step % 17 == 16 {
            job.clock.collecting(true);
            std::mem::take(&mut garbage).into_iter().for_each(|block| job.free(block));
            job.clock.collecting(false);
        }
        job.train(ACT);
    }
    let notes = job.report().not_leaks;
    let note = notes.iter().find(|note| note.kind == "gc").unwrap_or_else(|| panic!("{notes:?}"));
    assert!(note.what.contains("112 blocks") && note.because.contains("up to 1"), "{note:?}");
}

#[test]
fn a_finding_that_is_freed_at_once_says_how_much_it_was() {
    let mut job = Job::new(1);
    let mut kept = Vec::new();
    for _ in 0..60 {
        if job.called.is_empty() {
            kept.push(job.alloc(SITE, 1 << 20));
        } else {
            std::mem::take(&mut kept).into_iter().for_each(|block| job.free(block));
        }
        job.train(ACT);
    }
    assert_eq!(job.called.len(), 1);
    let notes = job.report().not_leaks;
    let note = notes.iter().find(|note| note.withdrawn).unwrap_or_else(|| panic!("{notes:?}"));
    assert!(note.because.contains("blocks, then was freed by step"), "{note:?}");
}

#[test]
fn a_bound_alone_acquits_nobody() {
    for (reason, findings) in [(None, 1), (Some("bounded container"), 0)] {
        let mut job = Job::new(1);
        job.python = Some(Box::new(move |_| Answer {
            bounded: Some(strandline::ledger::Bounded { length: 24, capacity: 1000 }),
            not_a_leak: reason.map(str::to_owned),
            ..held("replay", 9)
        }));
        for _ in 0..60 {
            job.leak(SITE, 4096);
            job.train(ACT);
        }
        assert_eq!(job.open().len(), findings, "{reason:?}");
    }
}

#[test]
fn growth_that_is_undecided_says_what_decides() {
    let mut job = Job::new(1);
    for step in 0..100 {
        if step % 30 == 29 {
            job.leak(SITE, 512 << 10);
        }
        job.train(ACT);
    }
    let report = job.report();
    assert!(report.findings.is_empty());
    let [open] = report.undecided.as_slice() else { panic!("{:?}", report.undecided) };
    assert!(open.what.contains("3 times") && open.decides.contains("4 times decide"), "{open:?}");
    assert!(report.reason.contains("1 growth undecided"), "{}", report.reason);
    let shown = text::report(&report, Colour::Never);
    assert!(shown.contains("\nundecided\n"), "{shown}");
    // A program without growth has no such line.
    let mut plain = Job::new(1);
    (0..100).for_each(|_| plain.train(ACT));
    assert!(plain.report().undecided.is_empty(), "{:?}", plain.report().undecided);
}

#[test]
fn phases_add_up_and_a_leak_frees_too_little() {
    let mut job = Job::new(1);
    for _ in 0..80 {
        job.leak(SITE, 1 << 20);
        job.train(ACT);
    }
    let report = job.report();
    let device = &report.devices[0];
    let flow = device.flow.unwrap();
    assert_eq!(flow.allocated_blocks - flow.freed_blocks, u64::from(flow.steps));
    assert_eq!(flow.allocated_bytes - flow.freed_bytes, u64::from(flow.steps) << 20);
    assert_eq!(device.phases.iter().map(|phase| phase.recent_freed).sum::<u64>(), flow.freed_bytes);
    let shown = text::report(&report, Colour::Never);
    assert!(shown.contains("frees too little"), "{shown}");
    assert!(shown.contains("trend: allocated +1.0 MiB/step"), "{shown}");
}
