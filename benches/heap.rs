//! What malloc and free cost, beside PyTorch's own algorithm over the same driver (`yardstick`).
//!
//! `cargo bench --bench heap` prints nanoseconds per malloc+free. *pair*: allocate and free at once. *churn*:
//! 2,000 live blocks, each operation frees a random one and allocates another (small: 512 B–512 KiB; mixed:
//! 512 B–16 MiB, log-uniform). *threads*: churn on 1, 2 and 4 threads, each with a stream of its own, all over
//! one lock. With `STRANDLINE_TRACES=DIR` (snapshots or traces, `.pickle[.gz]`) the recorded jobs are replayed
//! through all three: peak reserved over peak requested, and the driver calls as they would be priced on an H200.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use parking_lot::Mutex;
use strandline::driver::Stream;
use strandline::driver::host::{BooksDriver, HostDriver};
use strandline::heap::{Address, Config, Heap, Preset};
use strandline::replay::price::{Priced, Tally};
use strandline::replay::subject::{Figures, StrandlineHeap, Subject};
use strandline::replay::{file, run};
use work::{Allocator, Churn, S0, draws};
use yardstick::Yardstick;

mod work;
mod yardstick;

/// Of one short run of churn.
const OPERATIONS: usize = 1 << 16;

fn pair<A: Allocator>(c: &mut Criterion, name: &str, make: impl Fn() -> A) {
    let mut group = c.benchmark_group(format!("pair/{name}"));
    for (label, size) in [("4KiB", 4 << 10), ("64KiB", 64 << 10), ("4MiB", 4 << 20)] {
        let mut heap = make();
        group.bench_function(BenchmarkId::from_parameter(label), |b| {
            b.iter(|| {
                let at = heap.get(black_box(size), S0);
                heap.put(black_box(at));
            });
        });
    }
    group.finish();
}

fn churn<A: Allocator>(c: &mut Criterion, name: &str, make: impl Fn() -> A) {
    let mut group = c.benchmark_group(format!("churn/{name}"));
    for (label, largest) in [("small", 512.0 * 1024.0), ("mixed", 16.0 * 1024.0 * 1024.0)] {
        let mut churn = Churn::new(make(), largest);
        group.bench_function(BenchmarkId::from_parameter(label), |b| b.iter(|| churn.turn()));
        // On a machine that others use too, the best of many short runs says what the code costs.
        let mut runs: Vec<f64> = (0..40)
            .map(|_| {
                let start = std::time::Instant::now();
                (0..OPERATIONS).for_each(|_| churn.turn());
                start.elapsed().as_nanos() as f64 / OPERATIONS as f64
            })
            .collect();
        runs.sort_by(f64::total_cmp);
        println!("churn/{name}/{label}: best {:.1} ns, median {:.1} ns per malloc+free", runs[0], runs[20]);
    }
    group.finish();
}

/// Churn of small blocks on several threads over one lock: nanoseconds per malloc+free of all together.
fn threads<A: Allocator + Send>(name: &str, make: impl Fn() -> A) {
    for count in [1u64, 2, 4] {
        let heap = Mutex::new(make());
        let draws = draws(512.0 * 1024.0);
        let run = |stream: u64| {
            let stream = Stream(stream);
            let mut live: Vec<Address> =
                draws[..2000].iter().map(|&(_, size)| heap.lock().get(size, stream)).collect();
            let start = std::time::Instant::now();
            for &(slot, size) in draws.iter().cycle().take(4 * draws.len()) {
                heap.lock().put(live[slot]);
                live[slot] = heap.lock().get(size, stream);
            }
            start.elapsed().as_nanos() as f64
        };
        let longest = std::thread::scope(|scope| {
            let running: Vec<_> = (0..count).map(|stream| scope.spawn(move || run(stream))).collect();
            running.into_iter().map(|thread| thread.join().expect("a thread")).fold(0.0, f64::max)
        });
        let each = longest / (4 * draws.len() as u64 * count) as f64;
        println!("threads/{name}: {count} threads, {each:.1} ns per malloc+free of all together");
    }
}

/// The yardstick as what a recording is replayed through. A block on which another stream works is kept until
/// that work is done.
struct Replayed {
    yardstick: Yardstick<Priced<BooksDriver>>,
    priced: Priced<BooksDriver>,
    waiting: Vec<Option<Address>>,
}

impl Replayed {
    fn new(expandable: bool) -> Self {
        // More than a device has: what torch does when it runs out is not modelled.
        let priced = Priced::new(BooksDriver::with_memory(1 << 41));
        Replayed { yardstick: Yardstick::new(priced.clone(), expandable), priced, waiting: Vec::new() }
    }
}

impl Subject for Replayed {
    fn malloc(&mut self, _: u32, size: u64, stream: Stream) -> Result<Address, String> {
        self.yardstick.malloc(size, stream).map_err(|error| error.to_string())
    }

    fn free(&mut self, at: Address) -> Result<(), String> {
        self.yardstick.free(at);
        Ok(())
    }

    fn free_in_use(&mut self, at: Address) -> Result<u64, String> {
        self.waiting.push(Some(at));
        Ok(self.waiting.len() as u64 - 1)
    }

    fn completed(&mut self, work: u64) {
        if let Some(at) = self.waiting[work as usize].take() {
            self.yardstick.free(at);
        }
    }

    fn figures(&self) -> Figures {
        let (reserved, reserved_peak) = (self.yardstick.reserved, self.yardstick.reserved_peak);
        Figures { reserved, reserved_peak, ..Figures::default() }
    }

    fn tally(&self) -> Tally {
        self.priced.tally()
    }
}

/// The recorded jobs of a folder, if one is named.
fn traces() {
    let Ok(folder) = std::env::var("STRANDLINE_TRACES") else { return };
    let mut paths: Vec<_> = std::fs::read_dir(&folder)
        .expect("the folder that STRANDLINE_TRACES names")
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.to_string_lossy().contains(".pickle"))
        .collect();
    paths.sort();
    println!(
        "{:24} {:>10} {:>10} {:>10}   driver calls per step (last third), and ms in all: strandline, native, \
         expandable",
        "reserved ÷ requested", "strandline", "native", "expandable"
    );
    for path in paths {
        let bytes = std::fs::read(&path).expect("a readable recording");
        let recording = file::read(&bytes[..]).expect("a recording");
        let one = |outcome: run::Outcome| {
            let device = &outcome.devices[0];
            let ratio = device.figures.reserved_peak as f64 / device.recorded.requested_peak as f64;
            (ratio, device.late_calls, device.tally.microseconds / 1000.0)
        };
        let heap = |_| StrandlineHeap::new(141 << 30, Preset::Lean).map_err(|error| error.to_string());
        let ours = one(run::replay(&recording, None, heap, |_| {}).expect("a replay"));
        let torch = |expandable| {
            one(run::replay(&recording, None, |_| Ok(Replayed::new(expandable)), |_| {}).expect("a replay"))
        };
        let (native, expandable) = (torch(false), torch(true));
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        println!(
            "{:24} {:>10.4} {:>10.4} {:>10.4}   {:.1} {:.0}, {:.1} {:.0}, {:.1} {:.0}",
            name.split('.').next().unwrap_or_default(),
            ours.0,
            native.0,
            expandable.0,
            ours.1,
            ours.2,
            native.1,
            native.2,
            expandable.1,
            expandable.2,
        );
    }
}

fn benches(c: &mut Criterion) {
    let books = || BooksDriver::with_memory(140 << 30);
    let gpu = || Heap::new(books(), Config::lean()).expect("a heap");
    traces();
    threads("books", gpu);
    threads("torch native", || Yardstick::new(books(), false));
    pair(c, "books", gpu);
    churn(c, "books", gpu);
    for (name, expandable) in [("torch native", false), ("torch expandable", true)] {
        pair(c, name, || Yardstick::new(books(), expandable));
        churn(c, name, || Yardstick::new(books(), expandable));
    }
    let host = || Heap::new(HostDriver::with_memory(14 << 30), Config::host()).expect("a heap");
    pair(c, "host", host);
    churn(c, "host", host);
}

criterion_group! {
    name = heap;
    config = Criterion::default().sample_size(20).measurement_time(std::time::Duration::from_secs(2));
    targets = benches
}
criterion_main!(heap);
