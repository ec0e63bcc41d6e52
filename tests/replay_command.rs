//! `strandline replay` as a person or a script calls it.

use serde_json::Value;
use std::process::{Command, Output};

fn strandline(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_strandline"))
        .args(arguments)
        .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data"))
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn prints_a_table_and_the_finding() {
    let output = strandline(&["replay", "leak.pickle.gz"]);
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(text(&output.stderr), "");
    let said = text(&output.stdout);
    for part in [
        "peak requested",
        "peak reserved",
        "fragmentation",
        "driver calls",
        "60 steps, 4 epochs",
        "train.py:12",
    ] {
        assert!(said.contains(part), "{part} is not in\n{said}");
    }
}

#[test]
fn prints_one_json_object() {
    let output = strandline(&["replay", "--json", "small.pickle"]);
    assert_eq!(output.status.code(), Some(0));
    let told: Value = serde_json::from_slice(&output.stdout).unwrap();
    for key in
        ["requested_peak", "active_peak", "reserved_peak", "recorded_reserved_peak", "events", "driver_calls"]
    {
        assert!(told[key].is_u64(), "{key}: {}", told[key]);
    }
    assert!(told["findings"].is_array());
    assert!(told["fragmentation"].is_f64());
}

#[test]
fn says_what_is_wrong_with_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let hostile = folder.path().join("hostile.pickle");
    std::fs::write(&hostile, b"cos\nsystem\n(S'touch pwned'\ntR.").unwrap();
    let hostile = hostile.to_str().unwrap();
    let output = strandline(&["replay", hostile]);
    assert_eq!(output.status.code(), Some(2));
    let said = text(&output.stderr);
    assert_eq!(
        said,
        format!("strandline: {hostile} is not a snapshot: it wants to call os.system (GLOBAL at byte 0)\n")
    );
    assert_eq!(text(&output.stdout), "");
    for (file, part) in [
        ("nowhere.pickle", "cannot be opened"),
        (".", "is a folder"),
        ("make_snapshots.py", "is not a snapshot"),
    ] {
        let output = strandline(&["replay", file]);
        assert_eq!(output.status.code(), Some(2), "{file}");
        assert!(text(&output.stderr).contains(part), "{}", text(&output.stderr));
    }
}

#[test]
fn a_limit_that_is_too_small_has_its_own_exit_code() {
    let output = strandline(&["replay", "--limit", "8MiB", "leak.pickle.gz"]);
    assert_eq!(output.status.code(), Some(4));
    assert!(text(&output.stdout).contains("does not fit"));
    let output = strandline(&["replay", "--limit", "80GiB", "leak.pickle.gz"]);
    assert_eq!(output.status.code(), Some(0));
    let output = strandline(&["replay", "--limit", "much", "leak.pickle.gz"]);
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn a_saved_trace_replays_alike() {
    let folder = tempfile::tempdir().unwrap();
    let saved = folder.path().join("leak.strandline");
    let saved = saved.to_str().unwrap();
    let first = strandline(&["replay", "--json", "--save", saved, "leak.pickle.gz"]);
    let second = strandline(&["replay", "--json", saved]);
    let object = |output: &Output| -> Value {
        let mut object: Value = serde_json::from_slice(&output.stdout).unwrap();
        for key in ["file", "form"] {
            object.as_object_mut().unwrap().remove(key);
        }
        object
    };
    assert_eq!(object(&first), object(&second));
}
