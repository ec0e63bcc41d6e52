//! Recorded allocation histories under this heap: peak reserved against peak requested, and driver calls
//! in steady state.
//!
//! `STRANDLINE_OPS=DIR cargo test --release --test heap_trace -- --nocapture` replays every `NAME.ops` in
//! the folder: records of four little-endian u64, (0, id, size, stream) for an allocation, (1, id, 0, 0)
//! for a free and (2, 0, 0, 0) for a step of the optimizer. Without the variable a synthetic history
//! stands in.

use std::path::Path;

use strandline::driver::Stream;
use strandline::driver::host::BooksDriver;
use strandline::heap::{Address, Config, Heap, Tag};

#[derive(Clone, Copy)]
enum Op {
    Alloc { id: u64, size: u64, stream: u64 },
    Free { id: u64 },
    Step,
}

fn read(path: &Path) -> Vec<Op> {
    let bytes = std::fs::read(path).expect("a readable trace");
    let words: Vec<u64> = bytes
        .chunks_exact(8)
        .map(|chunk| u64::from_le_bytes(chunk.try_into().expect("eight bytes")))
        .collect();
    let op = |record: &[u64]| match record[0] {
        0 => Op::Alloc { id: record[1], size: record[2], stream: record[3] },
        1 => Op::Free { id: record[1] },
        _ => Op::Step,
    };
    words.chunks_exact(4).map(op).collect()
}

/// Layers of growing and shrinking sizes, as in a curriculum: the worst case for caches.
fn synthetic() -> Vec<Op> {
    let mut ops = Vec::new();
    let mut next = 0;
    let alloc = |ops: &mut Vec<Op>, next: &mut u64, size: u64| {
        ops.push(Op::Alloc { id: *next, size, stream: 0 });
        *next += 1;
        *next - 1
    };
    for layer in 0..24 {
        alloc(&mut ops, &mut next, (1 + layer % 3) * (9 << 20) / 4);
    }
    for step in 0..60u64 {
        let length = 200 + (step * 7919) % 800;
        let saved: Vec<u64> = (0..24)
            .map(|layer| {
                let workspace = alloc(&mut ops, &mut next, length * 9_000);
                let kept = alloc(&mut ops, &mut next, length * (4_096 + 512 * (layer % 5)));
                ops.push(Op::Free { id: workspace });
                kept
            })
            .collect();
        for id in saved.into_iter().rev() {
            let gradient = alloc(&mut ops, &mut next, length * 4_096);
            ops.push(Op::Free { id });
            ops.push(Op::Free { id: gradient });
        }
        ops.push(Op::Step);
    }
    ops
}

fn config() -> Config {
    let mut config = Config::lean();
    let number = |name: &str| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    if let Some(slack) = number("STRANDLINE_SLACK") {
        (config.slack, config.slack_before_wait) = (slack as u32, slack as u32);
    }
    if let Some(largest) = number("STRANDLINE_HANDLE") {
        config.largest_handle = largest;
    }
    config
}

struct Outcome {
    steps: usize,
    requested: u64,
    active: u64,
    reserved: u64,
    stitched: u64,
    calls: u64,
    /// Memory calls of the driver per step, in the last third of the steps.
    late: f64,
    /// Percentage of those steps without any.
    quiet_steps: usize,
    nanoseconds: f64,
}

fn replay(ops: &[Op]) -> Outcome {
    let driver = BooksDriver::with_memory(140 << 30);
    let mut heap = Heap::new(driver, config()).expect("a heap");
    let count = ops.iter().filter(|op| matches!(op, Op::Alloc { .. })).count();
    let mut at: Vec<Address> = vec![0; count];
    let mut calls_at_steps = Vec::new();
    let start = std::time::Instant::now();
    for op in ops {
        match *op {
            Op::Alloc { id, size, stream } => {
                at[id as usize] = heap.malloc(size, Stream(stream), Tag(id, 0)).expect("memory");
            }
            Op::Free { id } => {
                let freed = heap.free(at[id as usize]).expect("a live block");
                assert_eq!(freed.tag, Tag(id, 0));
            }
            Op::Step => calls_at_steps.push(heap.stats().work.memory_calls()),
        }
    }
    let nanoseconds = start.elapsed().as_nanos() as f64 / ops.len() as f64;
    heap.check().expect("a sound heap");
    let stats = heap.stats();
    let steps = calls_at_steps.len();
    let late = &calls_at_steps[steps * 2 / 3..];
    let span = (late.len().max(2) - 1) as f64;
    Outcome {
        steps,
        requested: stats.requested_bytes.all.peak,
        active: stats.active_bytes.all.peak,
        reserved: stats.reserved_bytes.all.peak,
        stitched: stats.work.stitched,
        calls: stats.work.memory_calls(),
        late: (late[late.len() - 1] - late[0]) as f64 / span,
        quiet_steps: late.windows(2).filter(|pair| pair[0] == pair[1]).count() * 100
            / (late.len() - 1).max(1),
        nanoseconds,
    }
}

#[test]
fn reserved_stays_near_requested() {
    let mut traces: Vec<(String, Vec<Op>)> = Vec::new();
    if let Ok(folder) = std::env::var("STRANDLINE_OPS") {
        for entry in std::fs::read_dir(folder).expect("the folder") {
            let path = entry.expect("an entry").path();
            if path.extension().is_some_and(|extension| extension == "ops") {
                let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
                traces.push((name, read(&path)));
            }
        }
        traces.sort_by(|a, b| a.0.cmp(&b.0));
    } else {
        traces.push(("synthetic".into(), synthetic()));
    }
    println!(
        "{:20} {:>5} {:>9} {:>9} {:>9} {:>7} {:>8} {:>7} {:>9} {:>6} {:>6}",
        "trace",
        "steps",
        "requested",
        "active",
        "reserved",
        "ratio",
        "stitched",
        "calls",
        "late/step",
        "quiet",
        "ns/op"
    );
    let mut worst: f64 = 0.0;
    for (name, ops) in &traces {
        let outcome = replay(ops);
        let ratio = outcome.reserved as f64 / outcome.requested as f64;
        worst = worst.max(ratio);
        println!(
            "{name:20} {:>5} {:>8}M {:>8}M {:>8}M {ratio:>7.4} {:>8} {:>7} {:>9.2} {:>5}% {:>6.0}",
            outcome.steps,
            outcome.requested >> 20,
            outcome.active >> 20,
            outcome.reserved >> 20,
            outcome.stitched,
            outcome.calls,
            outcome.late,
            outcome.quiet_steps,
            outcome.nanoseconds,
        );
    }
    assert!(worst <= 1.03, "peak reserved is {worst:.4} of peak requested");
}
