//! What came once, what comes again, and what only looks like a rhythm. Simulated programs.

mod ledger_sim;
use ledger_sim::*;
use std::cell::Cell;
use strandline::ledger::{Answer, Class};

const SITE: u32 = 900;
const ACT: u64 = 64 << 10;
const LARGE: u64 = 8 << 20;

/// A job that leaves something behind in these steps.
fn leaving(events: &[u32], steps: u32, python: Option<Box<dyn Fn(u32) -> Answer>>) -> Job {
    let mut job = Job::new(1);
    job.python = python;
    for step in 0..steps {
        if events.contains(&step) {
            job.leak(SITE, LARGE);
        }
        job.train(ACT);
    }
    job
}

fn put_off() -> Answer {
    Answer { reason: Some("more-to-come".into()), ..innocent("it came once so far") }
}

#[test]
fn what_came_twice_is_no_one_off() {
    let mut job = leaving(&[30, 60, 90], 100, None);
    assert_eq!(job.called.len(), 1, "the first alone looks like one: {:?}", job.called);
    assert_eq!(job.end(vec![]), vec![]);
    let report = job.report();
    assert!(report.undecided.iter().any(|open| open.what.contains("times in 100 steps")), "{report:?}");
    assert!(report.reason.contains("undecided"), "{}", report.reason);
    assert!(!report.reason.contains("is no leak"), "{}", report.reason);
}

#[test]
fn what_came_once_stays_one() {
    let open = leaving(&[30], 100, None).end(vec![]);
    assert_eq!((open.len(), open[0].class), (1, Class::OneOff));
    assert!(open[0].called_at <= 56, "{open:?}");
}

#[test]
fn a_small_neighbour_of_the_same_site_changes_nothing() {
    let mut job = Job::new(1);
    for step in 0..100 {
        if step == 30 {
            job.leak(SITE, LARGE);
        } else if step == 60 {
            job.leak(SITE, LARGE / 64);
        }
        job.train(ACT);
    }
    assert_eq!(job.end(vec![]).len(), 1);
}

#[test]
fn one_that_may_come_again_waits_for_the_second() {
    let epochs = leaving(&[30, 60, 90, 120], 130, Some(Box::new(|_| put_off()))).called;
    assert!(epochs.iter().all(|call| call.1 != Class::OneOff), "{epochs:?}");
    // In the time that its first took to come there was no second: it is asked about again.
    let asked = Cell::new(0);
    let alone = leaving(
        &[30],
        140,
        Some(Box::new(move |_| {
            asked.set(asked.get() + 1);
            if asked.get() == 1 { put_off() } else { held("kept", 7) }
        })),
    );
    assert_eq!(alone.called.len(), 1);
    let (_, class, step) = alone.called[0];
    assert!(class == Class::OneOff && (80..=100).contains(&step), "{:?}", alone.called);
}

#[test]
fn one_that_may_come_again_is_said_to_be_undecided() {
    let mut job = leaving(&[30], 60, Some(Box::new(|_| put_off())));
    assert_eq!(job.end(vec![]), vec![]);
    let reason = job.report().reason;
    assert!(reason.contains("is not called: it came once so far"), "{reason}");
}

#[test]
fn three_epochs_of_a_leak_are_undecided() {
    let mut job = Job::new(1);
    job.python = Some(Box::new(|_| put_off()));
    for step in 0..90 {
        if step % 30 == 0 {
            job.clock.begin_epoch();
            if step > 0 {
                job.leak(SITE, LARGE);
            }
        }
        job.train(ACT);
    }
    assert_eq!(job.end(vec![]), vec![]);
    let reason = job.report().reason;
    assert!(reason.contains("2 times in 90 steps something stayed behind, about every 30 steps"), "{reason}");
    assert!(!reason.contains("once"), "{reason}");
}

#[test]
fn the_second_of_two_that_follow_each_other_is_not_explained_by_the_first() {
    let mut job = Job::new(1);
    let mut best = None;
    for step in 0..140 {
        if step == 30 || step == 80 {
            let next = job.alloc(SITE, LARGE);
            if let Some(old) = best.replace(next) {
                job.free(old);
            }
        }
        job.train(ACT);
    }
    assert_eq!(job.end(vec![]), vec![]);
    let reason = job.report().reason;
    assert!(!reason.contains("then freed by step"), "{reason}");
    assert!(reason.contains("it takes the place of what is freed meanwhile"), "{reason}");
}

#[test]
fn a_few_gaps_make_a_rhythm_only_where_they_are_the_same() {
    let chance = leaving(&[24, 36, 46, 54], 62, None);
    assert_eq!(chance.called, vec![]);
    let skips = leaving(&[6, 16, 26, 48, 59], 62, None);
    assert!(skips.called.iter().all(|call| call.1 != Class::PerEpoch), "{:?}", skips.called);
    for rhythm in [[24, 34, 44, 54], [24, 34, 45, 54]] {
        let called = leaving(&rhythm, 62, None).called;
        assert_eq!(called.len(), 1, "{called:?}");
        assert_eq!(called[0].1, Class::PerEpoch);
    }
}

#[test]
fn every_third_step_of_a_first_epoch_is_not_irregular() {
    let run = |leaves: &dyn Fn(u32) -> bool| {
        let mut job = Job::new(1);
        for step in 0..120 {
            if step % 30 == 0 {
                job.clock.begin_epoch();
            }
            if leaves(step % 30) {
                job.leak(SITE, 16 << 10);
            }
            job.train(ACT);
        }
        job.called
    };
    let called = run(&|step| step % 3 == 0);
    assert_eq!(called.len(), 1, "{called:?}");
    assert_eq!(called[0].1, Class::PerIteration, "{called:?}");
    let called = run(&|step| [2, 7, 9, 18, 20, 26].contains(&step));
    assert_eq!((called.len(), called[0].1), (1, Class::Sporadic), "{called:?}");
    assert!(called[0].2 <= 34, "{called:?}");
}

#[test]
fn what_nobody_looks_for_is_no_cache_that_fills() {
    // 13 in the first half, 9 in the second, after a pause.
    let events: Vec<u32> = vec![
        6, 9, 14, 30, 37, 41, 66, 180, 195, 243, 251, 290, 300, 371, 391, 444, 470, 538, 560, 572, 650, 688,
    ];
    let run = |keyless: bool| {
        let dict = move |_| {
            let mut answer = Answer { keyless, ..held("archive", 9) };
            answer.held_by.as_mut().unwrap().kind = "dict".into();
            answer
        };
        leaving(&events, 700, Some(Box::new(dict))).end(vec![])
    };
    let open = run(true);
    assert_eq!((open.len(), open[0].class), (1, Class::Sporadic));
}

#[test]
fn a_finding_that_changed_is_said_anew_and_not_again_and_again() {
    let run = |leaves: &dyn Fn(&mut Job, u32)| {
        let (mut job, mut said) = (Job::new(1), Vec::new());
        job.python = Some(Box::new(|_| held("kept", 7)));
        for step in 0..400 {
            leaves(&mut job, step);
            job.train(ACT);
            said.extend(job.judge.take_changed().into_iter().map(|(now, was)| (was.class, now.class)));
        }
        (job.called.len(), said)
    };
    // One line leaves little in each step; later another one of the same cause leaves much.
    let grows = run(&|job, step| {
        job.leak(SITE, 512);
        if step > 60 {
            job.leak(SITE + 1, 64 << 10);
        }
    });
    assert_eq!(grows, (1, vec![(Class::PerIteration, Class::PerIteration)]));
    let same = run(&|job, step| job.leak(SITE, if step < 60 { 512 } else { 700 }));
    assert_eq!(same, (1, vec![]));
    // Chance first, then every step.
    let class = run(&|job, step| {
        if [30, 36, 47, 51, 63, 70].contains(&step) || step > 90 {
            job.leak(SITE, 4096);
        }
    });
    assert_eq!(class, (1, vec![(Class::Sporadic, Class::PerIteration)]));
}
