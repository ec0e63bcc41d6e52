//! What a report of a million live blocks costs: how long the device is locked (a job that allocates waits that
//! long), the JSON, the page, and their sizes. `cargo bench --bench report`. Times are the thread's own CPU time, so
//! that a busy machine does not distort them.

use std::hint::black_box;
use std::time::Duration;
use strandline::attach::served::Served;
use strandline::driver::Stream;
use strandline::driver::host::HostDriver;
use strandline::heap::{Config, Heap};
use strandline::ledger::{Clock, Frame, Judge, Symbols};
use strandline::report::{DevicePart, DeviceView, Run, assemble, html, json, text};
use strandline::stacks::StackId;

const BLOCKS: u64 = 1_000_000;
const SITES: u32 = 5_000;
const STEPS: u32 = 200;
const ROUNDS: usize = 9;

/// CPU time of this thread.
fn spent() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid, writable timespec for the duration of the call.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Stacks of 30 frames that share their outer parts.
struct Lines;

impl Symbols for Lines {
    fn frames(&self, stack: u32) -> Vec<Frame> {
        let frame = |depth: u32| Frame {
            file: format!(
                "/home/user/project/package_{}/module_{}.py",
                depth % 5,
                (stack >> (depth / 4)) % 97
            ),
            line: 10 + depth + (stack >> (depth / 3)) % 400,
            function: format!("Class{}.method_{}", depth % 7, (stack >> (depth / 2)) % 50),
            kind: "python".into(),
            user: depth.is_multiple_of(3),
        };
        (0..30).map(frame).collect()
    }
}

fn main() {
    let heap =
        Heap::new(HostDriver::with_memory(64 << 30), Config::host()).expect("address space for a heap");
    let served = Served::new(-1, heap, None);
    let (clock, mut judge) = (Clock::new(), Judge::new());
    let mut random = 1u64;
    let mut next = || {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        random >> 33
    };
    let mut live = Vec::new();
    while (live.len() as u64) < BLOCKS {
        let step = clock.now().step;
        // Mostly small tensors; every third block is freed again, so that there are gaps.
        for _ in 0..BLOCKS * 3 / 2 / u64::from(STEPS) + 1 {
            let size = if next().is_multiple_of(50) { 4096 + next() % 65536 } else { 8 + next() % 1024 };
            let stack = StackId(1 + (next() % u64::from(SITES)) as u32);
            let at = served.malloc(size, Stream(0), stack, &clock).expect("a block");
            live.push(at);
            if next().is_multiple_of(3) {
                let victim = live.swap_remove((next() % live.len() as u64) as usize);
                served.free(victim, &clock).expect("a block of ours");
            }
        }
        let ended = clock.end_step(u64::from(step) * 50_000_000);
        let mut books = served.lock();
        let sample = books.sample();
        books.accounts.boundary(ended, clock.now().epoch, &sample);
        judge.look(&mut books.accounts, &clock);
    }
    println!("{} live blocks of {SITES} sites, {} steps", live.len(), clock.now().step);
    let wanted = judge.wanted(-1);
    let mut times: Vec<[Duration; 5]> = Vec::new();
    let mut sizes = (0, 0, 0);
    for _ in 0..ROUNDS {
        let start = spent();
        let books = served.lock();
        let mut view = DeviceView::of(&books.accounts, &wanted);
        (view.device.segments, view.device.segments_left_out) = books.segment_map();
        drop(books);
        let locked = spent() - start;
        let part = DevicePart { view, stats: serde_json::Map::new() };
        let report = assemble(Run::default(), vec![part], &judge, &clock, &Lines);
        let assembled = spent() - start;
        let json = json::to_string(&report);
        let written = spent() - start;
        let text = text::report(&report, text::Colour::Never);
        let told = spent() - start;
        let page = html::page(&report);
        let drawn = spent() - start;
        sizes = (json.len(), text.len(), page.len());
        black_box((json, text, page));
        times.push([locked, assembled - locked, written - assembled, told - written, drawn - told]);
    }
    let median = |at: usize| {
        let mut all: Vec<Duration> = times.iter().map(|round| round[at]).collect();
        all.sort();
        (all[ROUNDS / 2], all[ROUNDS - 1])
    };
    let rows = [
        ("device locked (copy, segment map)", None),
        ("put together (findings, symbols)", None),
        ("JSON", Some(sizes.0)),
        ("text", Some(sizes.1)),
        ("page (HTML)", Some(sizes.2)),
    ];
    println!("{:<36}{:>12}{:>12}{:>12}", "", "median", "slowest", "bytes");
    for (at, (name, size)) in rows.iter().enumerate() {
        let (middle, slowest) = median(at);
        let size = size.map_or_else(String::new, |size| size.to_string());
        println!(
            "{name:<36}{:>9.1} ms{:>9.1} ms{size:>12}",
            middle.as_secs_f64() * 1e3,
            slowest.as_secs_f64() * 1e3
        );
    }
}
