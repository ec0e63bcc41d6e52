//! Runs `stacks_driver.py` under every Python that can be found: the stacks that strandline captures
//! against the interpreter's own frames.
//!
//! Interpreters: `STRANDLINE_TEST_PYTHONS` (paths, separated by colons), or `python3.9` … `python3.14` and
//! `python3` on PATH and pyenv's versions. None at all is a failure.

#[path = "stacks_interpreters/mod.rs"]
mod interpreters;

use std::process::Command;

use interpreters::{Interpreter, interpreters, probe};

fn run(python: &Interpreter, arguments: &[&str]) -> std::process::Output {
    let driver = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/stacks_driver.py");
    Command::new(&python.path)
        .arg("-W")
        .arg("ignore")
        .arg(driver)
        .arg(probe())
        .args(arguments)
        .output()
        .unwrap_or_else(|error| panic!("{} cannot be run: {error}", python.path.display()))
}

fn drive(python: &Interpreter, arguments: &[&str]) {
    let output = run(python, arguments);
    let text = String::from_utf8_lossy(&output.stdout);
    println!("== {} {} {arguments:?}\n{text}", python.version, python.path.display());
    assert!(
        output.status.success(),
        "{} {arguments:?}: {}\n{text}{}",
        python.path.display(),
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn stacks_are_what_the_interpreter_says() {
    let all = interpreters();
    let known: Vec<_> = all.iter().filter(|python| (9..=14).contains(&python.minor)).collect();
    assert!(!known.is_empty(), "no Python 3.9 to 3.14 was found; set STRANDLINE_TEST_PYTHONS");
    for python in known {
        drive(python, &[]);
    }
}

#[test]
fn the_public_api_serves_where_offsets_may_not_be_used() {
    let all = interpreters();
    let known: Vec<_> = all.iter().filter(|python| (9..=14).contains(&python.minor)).collect();
    assert!(!known.is_empty(), "no Python 3.9 to 3.14 was found; set STRANDLINE_TEST_PYTHONS");
    for python in known {
        drive(python, &["public-api"]);
    }
}

/// Not every machine has one: an interpreter too old to be known is declined, not crashed.
#[test]
fn an_unknown_interpreter_is_declined() {
    for python in interpreters().iter().filter(|python| python.minor < 9) {
        let output = run(python, &[]);
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.code().is_some(), "{}: {}\n{text}", python.version, output.status);
        assert!(text.lines().next().is_some_and(|line| line.contains("error: ")), "{text}");
    }
}
