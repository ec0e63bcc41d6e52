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
    assert!(report.reason.starts_with("no leak in 100 steps; 1 growth undecided: "), "{}", report.reason);
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

#[test]
fn what_came_and_stayed_is_never_nothing() {
    // Parameters of a net that grows, excused by who knows them.
    let mut job = Job::new(1);
    job.python = Some(Box::new(|_| innocent("parameter: the weight of blocks.1")));
    for step in 0..84 {
        if step % 12 == 11 {
            job.leak(SITE, 1 << 20);
        }
        job.train(ACT);
    }
    job.end(vec![]);
    let reason = job.report().reason;
    assert!(reason.starts_with("no leak in 84 steps; "), "{reason}");
    assert!(
        reason.contains("stayed (train.py:900) and is no leak: parameter: the weight of blocks.1"),
        "{reason}"
    );
    // A single small thing that nobody judged.
    let mut job = Job::new(1);
    for step in 0..84 {
        if step == 40 {
            job.leak(SITE, 400 << 10);
        }
        job.train(ACT);
    }
    job.end(vec![]);
    let reason = job.report().reason;
    assert!(reason.contains("400.0 KiB that came after step 20 stayed (train.py:900)"), "{reason}");
    assert!(reason.contains("it came once, in step 40"), "{reason}");
}

#[test]
fn what_is_replaced_by_larger_ones_says_so() {
    let mut job = Job::new(1);
    let mut data: Option<Block> = None;
    for step in 0..100 {
        if step % 20 == 0 {
            let next = job.alloc(SITE, (1 + step / 20) << 20);
            if let Some(old) = data.replace(next) {
                job.free(old);
            }
        }
        job.train(ACT);
    }
    let reason = job.report().reason;
    assert!(
        reason.contains("takes the place of what is freed meanwhile, the newest is of step 80"),
        "{reason}"
    );
}

#[test]
fn nothing_is_said_to_stay_that_takes_the_place_of_another_or_comes_and_goes() {
    let mut plain = Job::new(1);
    (0..200).for_each(|_| plain.train(ACT));
    assert_eq!(plain.report().reason, "nothing accumulated in 200 steps");
    let mut job = Job::new(1);
    let mut kept = Vec::new();
    let mut state: Vec<Block> = (0..12).map(|_| job.alloc(SITE + 1, 1 << 20)).collect();
    for step in 0..200 {
        if step % 40 == 39 {
            kept.drain(..).for_each(|block| job.free(block));
        }
        kept.push(job.alloc(SITE, 64 << 10));
        if step == 92 {
            let restored: Vec<Block> = (0..12).map(|_| job.alloc(SITE + 2, 1 << 20)).collect();
            std::mem::replace(&mut state, restored).into_iter().for_each(|block| job.free(block));
        }
        job.train(ACT);
    }
    assert_eq!(job.report().reason, "nothing accumulated in 200 steps");
}

#[test]
fn few_events_at_no_rhythm_are_undecided() {
    let mut job = Job::new(1);
    for step in 0..100 {
        if [31, 35, 62, 90].contains(&step) {
            job.leak(SITE, 256 << 10);
        }
        job.train(ACT);
    }
    job.end(vec![]);
    let report = job.report();
    assert!(report.findings.is_empty());
    let [open] = report.undecided.as_slice() else { panic!("{:?}", report.undecided) };
    assert!(open.what.starts_with("4 times in 100 steps") && open.what.contains("step 90"), "{open:?}");
    assert_eq!(open.decides, "5 times decide it: 1 more");
    assert!(report.reason.starts_with("no leak in 100 steps; 1 growth undecided: train.py:900, 4 times"));
}

#[test]
fn what_two_alternating_optimizers_use_is_not_undecided() {
    for steps in 100..106 {
        let mut job = Job::new(1);
        let mut fake: Option<Block> = None;
        for step in 0..steps {
            if step % 3 == 0 {
                let next = job.alloc(SITE, 1 << 20);
                if let Some(old) = fake.replace(next) {
                    job.free(old);
                }
            }
            job.train(ACT);
        }
        assert_eq!(job.report().reason, format!("nothing accumulated in {steps} steps"));
    }
}

#[test]
fn what_a_step_does_besides_is_no_large_input() {
    let mut job = Job::new(1);
    for step in 0..150 {
        if step % 50 == 49 {
            let joined = job.alloc(SITE, 64 << 20);
            job.free(joined);
        }
        job.train(ACT);
    }
    let notes = job.report().not_leaks;
    let note = notes.iter().find(|note| note.kind == "other-work").unwrap_or_else(|| panic!("{notes:?}"));
    assert_eq!(note.allocated_at.as_ref().map(|at| at.line), Some(SITE));
    assert!(notes.iter().all(|note| note.kind != "largest-input"));
}

#[test]
fn records_at_equal_distances_do_not_become_rarer() {
    let notes = |steps: u64, sizes: &dyn Fn(u64) -> u64| {
        let mut job = Job::new(1);
        (0..steps).for_each(|step| job.train(ACT * sizes(step)));
        let notes = job.report().not_leaks;
        notes.into_iter().find(|note| note.kind == "largest-input").map(|note| note.what).unwrap_or_default()
    };
    let what = notes(300, &|step| 1 << (step / 60));
    assert!(what.contains(" times, to 6.8 MiB"), "{what}");
    let what = notes(100, &|step| if [4, 8, 13, 21].contains(&step) { step } else { 1 });
    assert!(what.contains("ever more rarely"), "{what}");
}

#[test]
fn a_program_that_does_ever_more_has_no_larger_input() {
    let mut job = Job::new(1);
    for step in 0..160u64 {
        for layer in 0..1 + step / 4 {
            let blocks: Vec<Block> = (0..6).map(|site| job.alloc(SITE + site, ACT + layer % 2)).collect();
            blocks.into_iter().for_each(|block| job.free(block));
        }
        job.step();
    }
    let said = kinds(&job);
    assert!(said.contains(&"growing-work".to_owned()), "{said:?}");
    assert!(!said.contains(&"growing-input".to_owned()), "{said:?}");
}

#[test]
fn phases_of_the_programs_own_are_shown_by_name() {
    let mut job = Job::new(1);
    let rollout = job.clock.phase_of("rollout").unwrap();
    for _ in 0..80 {
        job.clock.enter(rollout);
        job.leak(SITE, 1 << 20);
        job.train(ACT);
    }
    let report = job.report();
    assert_eq!(report.findings[0].phase, "rollout");
    let phase = report.devices[0].phases.iter().find(|phase| phase.phase == "rollout").unwrap();
    assert!(phase.live_bytes >= 80 << 20 && phase.recent_allocated > 0, "{phase:?}");
    assert!(report.sites.iter().any(|site| site.phase == "rollout"));
    let shown = text::report(&report, Colour::Never);
    assert!(shown.contains("\n  rollout "), "{shown}");
}
