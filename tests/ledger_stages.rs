//! Programs that go on to something else: what leaked in a stage is a leak when the stage is over, and what settled
//! while the stage went on is none. What was said and does not stand is taken back with a word.

mod ledger_sim;
use ledger_sim::*;
use strandline::ledger::{Answer, Class, Phase, Use};
use strandline::report::model::{Remark, Verdict};
use strandline::report::{describe, text};

const LEAK: u32 = 900;
const ACT: u64 = 64 << 10;

/// 300 steps that leak, then 100 of another loop. What was kept, and whether it is freed between them.
fn two_stages(freed: bool, used: impl Into<Option<Use>>) -> Job {
    let mut job = Job::new(1);
    let used = used.into();
    job.python = Some(Box::new(move |stack| Answer { used, ..held("kept", stack) }));
    let mut kept = Vec::new();
    for _ in 0..300 {
        kept.push(job.alloc(LEAK, 4096));
        job.train(ACT);
    }
    if freed {
        kept.drain(..).for_each(|block| job.free(block));
    }
    job.stage = 10_000;
    (0..100).for_each(|_| job.train(ACT));
    job.end(vec![]);
    job
}

#[test]
fn the_next_stage_does_not_acquit_the_one_before() {
    let job = two_stages(false, Use::Never);
    let open = job.open();
    assert_eq!((open.len(), open[0].class), (1, Class::PerIteration), "{open:?}");
    let finding = &job.report().findings[0];
    assert!(finding.evidence.contains("ended in step 299: 1.2 MiB are still held"), "{}", finding.evidence);
    assert!((finding.bytes_per_step / 4096.0 - 1.0).abs() < 0.01 && finding.forecast.is_none());
}

#[test]
fn what_a_stage_frees_only_at_its_end_leaked_while_it_ran() {
    let job = two_stages(true, Use::Never);
    assert_eq!(job.open().len(), 1);
    let evidence = &job.report().findings[0].evidence;
    assert!(evidence.contains("1.2 MiB were freed in step 300 and not before"), "{evidence}");
}

#[test]
fn what_a_stage_gathers_for_the_next_is_no_leak() {
    for (freed, used) in [(true, Use::Read), (false, Use::Gathered), (false, Use::Again)] {
        let mut job = two_stages(freed, used);
        assert_eq!(job.open(), [], "{freed}");
        let gone = job.judge.take_withdrawn();
        assert_eq!(gone.len(), 1, "a finding that was said is taken back with a word");
        assert!(gone[0].withdrawn.is_some() && job.judge.take_withdrawn().is_empty());
    }
}

#[test]
fn unknown_use_is_not_never() {
    let mut job = two_stages(true, None);
    assert_eq!(job.open(), [], "freed in full, and for all that is known it was read before");
    assert_eq!(job.judge.take_withdrawn().len(), 1);
    assert_eq!(two_stages(false, None).open().len(), 1, "still held, and nothing speaks for it");
}

#[test]
fn what_was_gathered_says_how_to_be_rid_of_it() {
    let job = two_stages(false, Use::Gathered);
    let because = &job.judge.findings()[0].withdrawn.clone().unwrap_or_default();
    assert!(because.contains("ended in step 299") && because.contains("del frees it"), "{because}");
    assert_eq!(
        two_stages(false, Use::Read).open().len(),
        1,
        "a glance at the newest is no reading of them all"
    );
}

#[test]
fn what_settles_late_in_a_long_run_is_taken_back() {
    let mut job = Job::new(1);
    for step in 0..2_700 {
        for stack in (LEAK..LEAK + 4).filter(|_| (2_100..2_200).contains(&step)) {
            job.leak(stack, 4096);
        }
        job.train(ACT);
    }
    assert_eq!(job.end(vec![]), [], "every site is looked at again, whatever its number");
    assert!(!job.called.is_empty());
}

#[test]
fn a_cache_that_is_full_settled_while_its_stage_goes_on() {
    let mut job = Job::new(1);
    for step in 0..200 {
        if step < 60 {
            job.leak(LEAK, 4096);
        }
        job.train(ACT);
    }
    assert_eq!(job.end(vec![]), []);
    assert_eq!(job.judge.take_withdrawn().len(), 1);
}

#[test]
fn the_rate_of_a_leak_that_began_late_is_its_own() {
    let mut job = Job::new(1);
    for step in 0..300 {
        if step >= 200 {
            job.leak(LEAK, 64 << 10);
        }
        job.train(ACT);
    }
    job.end(vec![]);
    let rate = job.report().findings[0].bytes_per_step;
    assert!((rate / 65_536.0 - 1.0).abs() < 0.02, "{rate}");
}

#[test]
fn neighbouring_lists_of_different_owners_are_two_findings() {
    let mut job = Job::new(1);
    job.python = Some(Box::new(|stack| held(if stack == LEAK { "A" } else { "B" }, stack)));
    for _ in 0..60 {
        job.leak(LEAK, 4096);
        job.leak(LEAK + 1, 512);
        job.train(ACT);
    }
    assert_eq!(job.end(vec![]).len(), 2);
}

#[test]
fn records_of_a_growing_input_are_no_epochs() {
    let mut job = Job::new(3);
    let (mut most, mut mask) = (0, None);
    let mut rises = 0;
    for step in 0..160 {
        let length = 10 + job.rng.below(10 + step);
        if length > most {
            most = length;
            rises += 1;
            let new = job.alloc(LEAK, length * length * 4);
            if let Some(old) = mask.replace(new) {
                job.free(old);
            }
        }
        job.train(ACT);
    }
    assert!(rises > 12, "{rises}");
    assert!(job.end(vec![]).iter().all(|open| open.class != Class::PerEpoch));
}

#[test]
fn a_rhythm_without_epochs_counts_by_its_steps() {
    let mut job = Job::new(1);
    for step in 0..100 {
        if step % 10 == 9 {
            job.leak(LEAK, 4096);
        }
        job.train(ACT);
    }
    job.end(vec![]);
    let finding = &job.report().findings[0];
    assert_eq!((finding.class, finding.per.as_str()), (Class::PerEpoch, "10 steps"));
    assert_eq!(text::rate(finding), "+4.0 KiB every 10 steps");
}

#[test]
fn what_is_taken_back_is_said_with_the_reason() {
    let mut job = two_stages(true, Use::Read);
    let gone = job.judge.take_withdrawn();
    let finding = describe::finding(&job.judge, &gone[0], &Lines, &job.clock);
    let said = text::taken_back(&finding, gone[0].withdrawn.as_deref().unwrap(), text::Colour::Never);
    assert!(said.starts_with("strandline: TAKEN BACK  per-iteration, called at step 24: grew to"), "{said}");
}

#[test]
fn nothing_is_clean_where_a_graph_or_the_number_of_hooks_grows() {
    let mut job = Job::new(1);
    (0..60).for_each(|_| job.train(ACT));
    job.end(vec![]);
    let remarked = |kind: &str| {
        let remark = Remark { kind: kind.into(), what: "total grows".into(), ..Remark::default() };
        job.report().with_remarks(vec![remark])
    };
    assert_eq!(remarked("left-over-workers").verdict, Verdict::Clean);
    for kind in ["growing-graph", "repeated-hooks"] {
        let report = remarked(kind);
        assert_eq!(report.verdict, Verdict::Undecided);
        assert_eq!(report.reason, "no tensor accumulated in 60 steps, but total grows");
    }
}

#[test]
fn layers_unfrozen_in_quick_succession_are_no_growing_input() {
    let mut job = Job::new(1);
    for step in 0..160u64 {
        // Backward and optimizer need more every eight steps, forward needs the same.
        job.clock.enter(Phase::Backward);
        let more: Vec<Block> =
            (0..8).map(|at| job.alloc(BACKWARD + 50 + at, 4096 * (1 + step / 8))).collect();
        more.into_iter().for_each(|block| job.free(block));
        job.train(512);
    }
    job.end(vec![]);
    assert!(job.report().not_leaks.iter().all(|note| note.kind != "growing-input"));
}
