//! What a capture costs, for 3, 13, 23 and 43 Python frames: `cargo bench --bench stacks`.
//!
//! Not Criterion: the time is taken inside real interpreters, through the probe. `distinct` calls a
//! different function at every level, as real programs do; `recursive` one function, which flatters.

#[path = "../tests/stacks_interpreters/mod.rs"]
mod interpreters;

use std::process::Command;

use interpreters::{interpreters, probe};

fn main() {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/stacks_bench.py");
    println!("ns per capture on a hit, best of five rounds");
    println!("{:<9} {:<10} {:>7} {:>7} {:>7} {:>7}   + native, 23", "Python", "chain", 3, 13, 23, 43);
    for python in interpreters().iter().filter(|python| (9..=14).contains(&python.minor)) {
        let output = Command::new(&python.path).arg(script).arg(probe()).output();
        match output {
            Ok(output) if output.status.success() => {
                for line in String::from_utf8_lossy(&output.stdout).lines() {
                    println!("{:<9} {line}", python.version);
                }
            }
            Ok(output) => println!("{:<9} {}", python.version, String::from_utf8_lossy(&output.stderr)),
            Err(error) => println!("{:<9} {error}", python.version),
        }
    }
}
