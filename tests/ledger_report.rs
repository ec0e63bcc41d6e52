//! The report's contract: keys, forms, files, and what is said of a run that decides nothing.

mod ledger_sim;
use ledger_sim::*;
use std::os::unix::fs::PermissionsExt;
use strandline::ledger::{Answer, LiveBlock};
use strandline::report::{Report, describe, json, text, write};

const LEAK: u32 = 17;

fn leaky(steps: u32, answers: bool) -> Job {
    let mut job = Job::new(1);
    if answers {
        job.python = Some(Box::new(|_| held("train.py: global running_loss (Tensor) > .grad_fn", 57)));
    }
    for _ in 0..steps {
        job.leak(LEAK, 4 << 20);
        job.train(64 << 10);
    }
    job.end(vec![]);
    job
}

#[test]
fn json_has_the_keys_of_the_contract_and_reads_back() {
    let report = leaky(200, true).report();
    let text = json::to_string(&report);
    let value: serde_json::Value = serde_json::from_str(&text).unwrap();
    for key in ["schema", "verdict", "reason", "run", "devices", "findings", "not_leaks", "sites"] {
        assert!(value.get(key).is_some(), "{key}");
    }
    for key in ["command", "pid", "rank", "world_size", "mode", "steps", "epochs"] {
        assert!(value["run"].get(key).is_some(), "{key}");
    }
    for key in ["device", "stats", "outside_bytes"] {
        assert!(value["devices"][0].get(key).is_some(), "{key}");
    }
    let finding = &value["findings"][0];
    for key in [
        "class",
        "confidence",
        "live_bytes",
        "live_blocks",
        "bytes_per_step",
        "bytes_per_epoch",
        "evidence",
        "released_by",
        "allocated_at",
        "stack",
        "called_at_step",
        "held_by",
        "kept_at",
        "fix",
    ] {
        assert!(finding.get(key).is_some(), "{key}");
    }
    assert_eq!(value["schema"], 1);
    assert_eq!(value["verdict"], "leak");
    assert_eq!(finding["class"], "per-iteration");
    assert_eq!(finding["allocated_at"]["line"], LEAK);
    assert_eq!(finding["kept_at"]["line"], 57);
    assert_eq!(value["run"]["steps"], 200);
    assert!((finding["bytes_per_step"].as_f64().unwrap() - 4194304.0).abs() < 1.0);
    assert_eq!(finding["live_blocks"], 200);
    assert!(finding["evidence"].as_str().unwrap().contains("steps left a block behind"));
    let again: Report = serde_json::from_str(&text).unwrap();
    assert_eq!(
        (&again.devices, &again.sites, &again.not_leaks),
        (&report.devices, &report.sites, &report.not_leaks)
    );
    assert_eq!(again.findings[0].stack, report.findings[0].stack);
    assert_eq!(again.findings[0].forecast.unwrap().steps, report.findings[0].forecast.unwrap().steps);
}

#[test]
fn text_looks_as_designed() {
    let job = leaky(200, true);
    let report = job.report();
    let shown = text::report(&report, text::Colour::Never);
    println!("{shown}");
    assert!(shown.contains("strandline: LEAK  per-iteration  +4.0 MiB/step  ("), "{shown}");
    assert!(shown.contains("  allocated at  train.py:42 in train_step > train.py:17 in forward"));
    assert!(shown.contains("(200 live blocks, 800.0 MiB)"));
    assert!(shown.contains("  held by       train.py: global running_loss (Tensor) > .grad_fn"));
    assert!(shown.contains("  kept alive at train.py:57    kept.append(x)"));
    assert!(shown.contains("  fix           append a number"));
    assert!(shown.contains("out of memory in about 20k steps, 34 min"), "{shown}");
    assert!(!shown.contains('\x1b'));
    assert!(text::report(&report, text::Colour::Always).contains("\x1b[1;31m"));
    let new = describe::finding(&job.judge, &job.judge.findings()[0], &Lines, &job.clock);
    assert!(shown.contains(&text::finding(&new, text::Colour::Never)[..60]));
}

#[test]
fn short_runs_are_undecided_and_say_what_would_decide() {
    let said = |steps, leak: bool| {
        let mut job = Job::new(1);
        for _ in 0..steps {
            if leak {
                job.leak(LEAK, 512);
            }
            job.train(4096);
        }
        job.end(vec![]);
        let report = job.report();
        (report.verdict.name(), report.reason)
    };
    assert_eq!(said(0, false).0, "undecided");
    assert!(said(0, false).1.contains("strandline.step()"));
    assert_eq!(said(5, false).0, "undecided");
    let (verdict, reason) = said(15, true);
    assert_eq!(verdict, "undecided");
    assert!(reason.contains("train.py:17") && reason.contains("40 steps"), "{reason}");
    assert_eq!(said(15, false).0, "clean");
    assert_eq!(said(60, true).0, "leak");
}

#[test]
fn candidates_and_answers_travel_as_json() {
    let mut job = Job::new(1);
    let mut blocks = Vec::new();
    let mut asked = 0;
    for step in 0..40u64 {
        let block = job.alloc(LEAK, 512);
        blocks.push(LiveBlock { address: 0x7000 + step * 512, size: 512, tag: block.tag });
        job.train(4096);
        if job.judge.waiting() > 0 {
            let text = job.judge.candidates_json(&Lines, |_, _| blocks.clone());
            let value: serde_json::Value = serde_json::from_str(&text).unwrap();
            let candidate = &value[0];
            assert_eq!(candidate["class"], "per-iteration");
            assert_eq!(candidate["allocated_at"]["line"], LEAK);
            let shown = candidate["blocks"].as_array().unwrap();
            assert_eq!(shown.len(), 16);
            assert_eq!(shown[0]["step"], 0);
            assert!(shown[15]["step"].as_u64().unwrap() + 2 <= step);
            let id = candidate["id"].as_u64().unwrap();
            assert!(job.judge.explain_json(id, "{").is_err());
            assert!(job.judge.explain_json(id + 99, "{}").is_err());
            let answer = r#"{"held_by": {"path": "history[3]", "kind": "list"}, "kept_at": null, "fix": "clear it",
                "released_by": "nothing", "not_a_leak": null, "bounded": null, "group": "history", "seconds": 0.01,
                "something_new": 1}"#;
            job.judge.explain_json(id, answer).unwrap();
            asked += 1;
        }
    }
    assert_eq!(asked, 1);
    let open = job.end(vec![]);
    assert_eq!(open.len(), 1);
    assert!(open[0].called_at <= 30, "{open:?}");
    assert_eq!(job.report().findings[0].held_by.as_ref().unwrap().path, "history[3]");
}

#[test]
fn a_bound_beyond_the_device_does_not_excuse() {
    let mut job = Job::new(1);
    job.python = Some(Box::new(|_| Answer {
        bounded: Some(strandline::ledger::Bounded { length: 26, capacity: 100_000 }),
        ..held("deque(maxlen=100000)", 9)
    }));
    for _ in 0..80 {
        job.leak(LEAK, 7 << 20);
        job.train(4096);
    }
    assert_eq!(job.end(vec![]).len(), 1);
}

#[test]
fn files_are_private_and_errors_name_the_remedy() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("strandline-out/rank0-1");
    let path = write::file(&folder, "report.json", b"{}").unwrap();
    write::file(&folder, "report.json", b"{\"a\": 1}").unwrap();
    let mode = |path: &std::path::Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&path), mode(&folder)), (0o600, 0o700));
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1, "nothing is left aside");
    let error = write::file(&path.join("below"), "x", b"").unwrap_err().to_string();
    assert!(error.contains("report.json") && error.contains("--out"), "{error}");
}

#[test]
fn truncated_and_foreign_files_are_refused_clearly() {
    let root = tempfile::tempdir().unwrap();
    let whole = json::to_string(&leaky(60, false).report());
    let said = |contents: &[u8]| {
        let path = root.path().join("report.json");
        std::fs::write(&path, contents).unwrap();
        json::read(&path).map(|_| ()).map_err(|error| error.to_string())
    };
    assert_eq!(said(whole.as_bytes()), Ok(()));
    assert!(said(&whole.as_bytes()[..whole.len() / 2]).unwrap_err().contains("ends in the middle"));
    assert!(said(b"").unwrap_err().contains("ends in the middle"));
    assert!(said(b"[1, 2]").unwrap_err().contains("not a strandline report"));
    assert!(said(b"\x80\x04\x95").unwrap_err().contains("not a strandline report"));
    assert!(said(b"{\"schema\": 7}").unwrap_err().contains("schema 7"));
    assert!(said(b"{\"schema\": 1}").unwrap_err().contains("verdict"));
    let missing = json::read(&root.path().join("none.json")).unwrap_err().to_string();
    assert!(missing.contains("no such file") && missing.contains("none.json"));
}

#[test]
fn what_happens_after_the_last_boundary_is_no_surprise() {
    let mut job = leaky(60, false);
    for stack in 0..700 {
        job.leak(stack, 1 << 20);
        let now = strandline::ledger::Now { step: 75, ..Default::default() };
        job.accounts.born(stack, 1 << 20, now);
    }
    let report = job.report();
    assert_eq!(report.findings.len(), 1);
    assert_eq!(report.findings[0].live_blocks, 60);
}

#[test]
fn a_job_in_which_everything_leaks_has_a_report_of_bounded_size() {
    let mut job = Job::new(1);
    for _ in 0..60 {
        for stack in 1_000..2_000 {
            job.leak(stack, 4096);
        }
        job.train(4096);
    }
    job.end(vec![]);
    let report = job.report();
    assert!(!report.findings.is_empty());
    assert!(report.sites.len() <= 256, "{}", report.sites.len());
    let page = strandline::report::html::page(&report);
    assert!(page.len() < strandline::report::html::MOST_BYTES);
}
