//! Leaks of every class, simulated: each must be called, in time, once, and stand at the end.

mod ledger_sim;
use ledger_sim::*;
use strandline::ledger::{Answer, Class, Holder};

const LEAK: u32 = 900;
const ACT: u64 = 64 << 10;

#[track_caller]
fn one(open: &[Open], class: Class, stack: u32, before: u32) {
    assert_eq!(open.len(), 1, "one finding: {open:?}");
    assert_eq!(open[0].class, class, "{open:?}");
    assert!(open[0].stacks.contains(&stack), "{open:?}");
    assert!(open[0].called_at <= before, "called too late: {open:?}");
}

#[test]
fn per_iteration_of_any_size_is_called_within_forty_steps() {
    for size in [512, 6_436, 14 << 20] {
        let mut job = Job::new(size);
        for step in 0..120 {
            if size > 512 && step % 60 == 0 {
                job.clock.begin_epoch();
            }
            job.leak(LEAK, size);
            job.train(ACT);
        }
        let open = job.end(vec![]);
        one(&open, Class::PerIteration, LEAK, 40);
    }
}

#[test]
fn per_iteration_with_an_answer_is_one_finding_of_many_sites() {
    let mut job = Job::new(1);
    job.python =
        Some(Box::new(|stack| if stack == LEAK + 3 { Default::default() } else { held("cache", 29) }));
    for _ in 0..100 {
        for site in 0..5 {
            job.leak(LEAK + site, 5_664);
        }
        job.train(ACT);
    }
    let open = job.end(vec![]);
    one(&open, Class::PerIteration, LEAK, 40);
    assert_eq!(open[0].stacks.len(), 5);
    assert_eq!(job.called.len(), 1, "{:?}", job.called);
}

#[test]
fn a_site_held_by_nobody_known_belongs_to_the_holder_of_its_rhythm() {
    let mut job = Job::new(1);
    let nobody = || Answer {
        held_by: Some(Holder {
            path: "Tensor held by C++ or a running statement".into(),
            kind: "stack".into(),
        }),
        group: Some("Tensor held by C++ or a running statement".into()),
        ..Answer::default()
    };
    job.python = Some(Box::new(move |stack| if stack == LEAK { nobody() } else { held("history", 71) }));
    for step in 0..120 {
        if step % 10 == 0 {
            job.clock.begin_epoch();
            job.leak(LEAK, 8192);
            job.leak(LEAK + 1, 4096);
        }
        job.train(ACT);
    }
    let open = job.end(vec![]);
    one(&open, Class::PerEpoch, LEAK, 60);
    assert!(open[0].stacks.contains(&(LEAK + 1)), "{open:?}");
    assert_eq!(job.report().findings[0].kept_at.as_ref().map(|kept| kept.line), Some(71));
}

#[test]
fn the_end_of_the_first_epoch_is_waited_for_once() {
    let mut job = Job::new(1);
    for step in 0..60 {
        if step == 20 || step == 40 {
            job.clock.begin_epoch();
        }
        job.leak(LEAK, 8192);
        job.train(ACT);
    }
    one(&job.end(vec![]), Class::PerIteration, LEAK, 30);
}

#[test]
fn two_holders_are_two_findings() {
    let mut job = Job::new(1);
    job.python = Some(Box::new(|stack| if stack == LEAK { held("a", 10) } else { held("b", 50) }));
    for _ in 0..60 {
        job.leak(LEAK, 4096);
        job.leak(LEAK + 1, 512);
        job.train(ACT);
    }
    assert_eq!(job.end(vec![]).len(), 2);
}

#[test]
fn per_iteration_in_most_steps_or_starting_late() {
    for seed in 0..60 {
        let mut job = Job::new(seed);
        let start = if seed % 2 == 0 { 0 } else { 30 + seed as u32 * 3 };
        for step in 0..start + 150 {
            if step >= start && job.rng.chance(0.8) {
                job.leak(LEAK, 2048);
            }
            let size = ACT + job.rng.below(ACT) / 256 * 256;
            job.train(size);
        }
        let open = job.end(vec![]);
        let pattern = &job.judge.cases()[0].pattern;
        assert_eq!(open[0].class, Class::PerIteration, "seed {seed}: {:?} {pattern:?}", job.called);
        one(&open, Class::PerIteration, LEAK, start + 40);
    }
}

#[test]
fn two_optimizers_leaking_in_every_second_step() {
    let mut job = Job::new(1);
    for step in 0..200 {
        if step % 2 == 1 {
            job.leak(LEAK, 8192);
        }
        job.train(ACT);
    }
    one(&job.end(vec![]), Class::PerIteration, LEAK, 40);
}

#[test]
fn a_leak_between_transients_of_its_own_site() {
    let mut job = Job::new(1);
    let mut previous = Vec::new();
    for _ in 0..100 {
        let transients: Vec<Block> = (0..8).map(|_| job.alloc(LEAK, 4096)).collect();
        job.leak(LEAK, 4096);
        for block in std::mem::replace(&mut previous, transients) {
            job.free(block);
        }
        job.train(ACT);
    }
    one(&job.end(vec![]), Class::PerIteration, LEAK, 40);
}

#[test]
fn per_epoch_without_an_epoch_clock_by_the_fourth() {
    for length in [6, 8, 10, 12, 40] {
        let mut job = Job::new(length);
        for _ in 0..12 {
            for _ in 0..length {
                job.train(ACT);
            }
            for site in 0..7 {
                job.leak(LEAK + site, 20_000);
                job.leak(LEAK + site, 20_000);
            }
        }
        let before = (length as f64 * 4.5) as u32 + 4; // nobody listens: four steps of patience
        let open = job.end(vec![]);
        one(&open, Class::PerEpoch, LEAK, before);
        assert_eq!(open[0].stacks.len(), 7);
        assert_eq!(job.called.len(), 1);
    }
}

#[test]
fn per_epoch_with_an_epoch_clock_and_uneven_epochs() {
    for seed in 0..40 {
        let mut job = Job::new(seed);
        for epoch in 0..12 {
            job.clock.begin_epoch();
            let length = 12 + job.rng.below(9);
            for step in 0..length {
                if step == 0 && epoch > 0 {
                    job.leak(LEAK, 42 << 20);
                }
                job.train(ACT);
            }
        }
        one(&job.end(vec![]), Class::PerEpoch, LEAK, 110);
    }
}

#[test]
fn a_new_optimizer_per_cycle_is_a_staircase() {
    let mut job = Job::new(3);
    for step in 0..144 {
        if step % 12 == 0 {
            for _ in 0..10 {
                job.leak(LEAK, 3_000);
            }
        }
        job.train(ACT);
    }
    one(&job.end(vec![]), Class::PerEpoch, LEAK, 54);
}

#[test]
fn sporadic_over_many_seeds_by_the_sixth_event() {
    let (mut runs, mut wrong, mut late) = (0, Vec::new(), Vec::new());
    for seed in 0..400 {
        let mut job = Job::new(seed);
        let rate = 0.04 + (seed % 5) as f64 * 0.01;
        let mut events = Vec::new();
        for step in 0..240 {
            if seed % 2 == 0 && step % 30 == 0 {
                job.clock.begin_epoch();
            }
            if job.rng.chance(rate) {
                events.push(step);
                for site in 0..5 {
                    job.leak(LEAK + site, 3_000);
                }
            }
            job.train(ACT);
        }
        if events.len() < 8 || 240 - events[events.len() - 1] > 60 {
            continue;
        }
        runs += 1;
        let open = job.end(vec![]);
        if open.len() != 1 || open[0].class != Class::Sporadic || open[0].stacks.len() != 5 {
            wrong.push((seed, open.clone(), events.clone()));
        } else if open[0].called_at > events[5] + 7 {
            late.push((seed, open[0].called_at, events.clone()));
        }
    }
    assert!(runs > 250, "{runs}");
    assert!(wrong.len() * 100 <= runs * 3, "{} of {runs}: {:?}", wrong.len(), &wrong[..wrong.len().min(4)]);
    assert!(late.len() * 100 <= runs * 5, "{} of {runs}: {:?}", late.len(), &late[..late.len().min(4)]);
}

#[test]
fn one_off_that_stays_and_its_innocent_neighbour() {
    let mut job = Job::new(1);
    for step in 0..200 {
        if step == 72 {
            for _ in 0..6 {
                job.leak(LEAK, 1 << 20);
                job.leak(LEAK + 1, 1 << 20);
            }
        }
        job.train(ACT);
    }
    let open = job.end(vec![]);
    one(&open, Class::OneOff, LEAK, 110);
    assert_eq!(open[0].stacks.len(), 2);
}

#[test]
fn a_tensor_that_regrows() {
    let mut job = Job::new(1);
    let mut preds = job.alloc(LEAK, 2_560);
    for step in 1..120u64 {
        let next = job.alloc(LEAK, 2_560 * (step + 1));
        job.free(preds);
        preds = next;
        let size = ACT + job.rng.below(8192);
        job.train(size);
    }
    one(&job.end(vec![preds]), Class::PerIteration, LEAK, 40);
}

#[test]
fn fragmentation_when_reserved_grows_and_use_does_not() {
    let mut job = Job::new(1);
    let mut clips = std::collections::VecDeque::new();
    let mut held = 0;
    for step in 0..200u64 {
        let size = (15 + step / 2) << 20;
        clips.push_back(job.alloc(LEAK, size));
        held += size;
        while held > 1300 << 20 {
            let clip: Block = clips.pop_front().unwrap();
            held -= clip.size;
            job.free(clip);
        }
        job.sample.reserved += if step > 46 { 80 << 20 } else { size };
        job.train(ACT);
    }
    let open = job.end(vec![]);
    assert_eq!(open.len(), 1, "{open:?}");
    assert_eq!(open[0].class, Class::Fragmentation);
    assert_eq!(job.report().findings[0].allocated_at.as_ref().unwrap().line, LEAK);
}

#[test]
fn the_teardown_withdraws_nothing() {
    let mut job = Job::new(1);
    let mut kept = Vec::new();
    for _ in 0..60 {
        kept.push(job.alloc(LEAK, 4096));
        job.train(ACT);
    }
    let open = job.end(kept);
    one(&open, Class::PerIteration, LEAK, 40);
    let report = job.report();
    assert!(report.findings[0].live_blocks >= 59, "{:?}", report.findings[0]);
}

#[test]
fn two_lists_in_neighbouring_lines_are_one_finding() {
    let mut job = Job::new(1);
    job.python = Some(Box::new(|stack| Answer {
        owner: Some("m".into()),
        ..held(if stack == LEAK { "m.preds" } else { "m.target" }, stack)
    }));
    for _ in 0..60 {
        job.leak(LEAK, 4096);
        job.leak(LEAK + 1, 512);
        job.train(ACT);
    }
    one(&job.end(vec![]), Class::PerIteration, LEAK, 40);
}

#[test]
fn late_in_a_long_run() {
    for (every, class) in [(1, Class::PerIteration), (100, Class::PerEpoch)] {
        let mut job = Job::new(1);
        job.layers = 2;
        for step in 0..6_000 {
            if step >= 4_000 && step % every == 0 {
                job.leak(LEAK, 4096);
            }
            job.train(ACT);
        }
        let open = job.end(vec![]);
        one(&open, class, LEAK, 4_000 + 45 * every);
        let rate = job.report().findings[0].bytes_per_step * f64::from(every);
        assert!((rate / 4096.0 - 1.0).abs() < 0.05, "{rate}");
    }
}

#[test]
fn a_pause_does_not_acquit() {
    let mut job = Job::new(1);
    for step in 0..400 {
        if !(120..220).contains(&step) {
            job.leak(LEAK, 4096);
        }
        job.train(ACT);
    }
    one(&job.end(vec![]), Class::PerIteration, LEAK, 40);
    assert_eq!(job.called.len(), 1);
}

#[test]
fn a_failed_batch_keeps_what_is_else_freed_in_its_step() {
    let mut job = Job::new(5);
    job.python =
        Some(Box::new(|stack| if stack % 2 == 0 { held("failures", 70) } else { Default::default() }));
    let mut bad = 0;
    for step in 0..223 {
        let fails = [9, 17, 44, 61, 66, 101, 120, 128, 159, 164, 190, 213].contains(&step);
        for site in 0..5 {
            if fails {
                job.leak(LEAK + site, 3_201);
            }
            let block = job.alloc(LEAK + site, 3_201);
            job.free(block);
        }
        bad += u32::from(fails);
        job.train(ACT);
    }
    assert_eq!(bad, 12);
    let open = job.end(vec![]);
    one(&open, Class::Sporadic, LEAK, 105);
    assert_eq!(open[0].stacks.len(), 5);
}
