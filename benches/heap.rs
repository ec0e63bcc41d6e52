//! What malloc and free cost. `cargo bench --bench heap` prints nanoseconds per malloc+free.
//!
//! *pair*: allocate and free at once. *churn*: 2,000 live blocks, each operation frees a random one and
//! allocates another (small: 512 B–512 KiB; mixed: 512 B–16 MiB, log-uniform).

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use strandline::driver::host::{BooksDriver, HostDriver};
use strandline::driver::{Driver, Stream};
use strandline::heap::{Address, Config, Heap, Tag};

const S0: Stream = Stream(0);

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

/// Log-uniform sizes from 512 bytes up to `largest`, and slots to free, drawn beforehand.
fn draws(largest: f64) -> Vec<(usize, u64)> {
    let mut random = Random(42);
    (0..1 << 16)
        .map(|_| {
            let unit = (random.next() >> 11) as f64 / (1u64 << 53) as f64;
            let size = 512.0 * (largest / 512.0).powf(unit);
            ((random.next() % 2000) as usize, size as u64)
        })
        .collect()
}

fn pair<D: Driver>(c: &mut Criterion, name: &str, driver: impl Fn() -> D, config: &Config) {
    let mut group = c.benchmark_group(format!("pair/{name}"));
    for (label, size) in [("4KiB", 4 << 10), ("64KiB", 64 << 10), ("4MiB", 4 << 20)] {
        let mut heap = Heap::new(driver(), config.clone()).expect("a heap");
        group.bench_function(BenchmarkId::from_parameter(label), |b| {
            b.iter(|| {
                let at = heap.malloc(black_box(size), S0, Tag(1, 2)).expect("memory");
                heap.free(black_box(at)).expect("a live block")
            });
        });
    }
    group.finish();
}

fn churn<D: Driver>(c: &mut Criterion, name: &str, driver: impl Fn() -> D, config: &Config) {
    let mut group = c.benchmark_group(format!("churn/{name}"));
    for (label, largest) in [("small", 512.0 * 1024.0), ("mixed", 16.0 * 1024.0 * 1024.0)] {
        let mut heap = Heap::new(driver(), config.clone()).expect("a heap");
        let draws = draws(largest);
        let mut live: Vec<Address> = draws[..2000]
            .iter()
            .map(|&(_, size)| heap.malloc(size, S0, Tag(1, 2)).expect("memory"))
            .collect();
        let mut next = 0;
        group.bench_function(BenchmarkId::from_parameter(label), |b| {
            b.iter(|| {
                let (slot, size) = draws[next & (draws.len() - 1)];
                next += 1;
                heap.free(live[slot]).expect("a live block");
                live[slot] = heap.malloc(size, S0, Tag(1, 2)).expect("memory");
            });
        });
        // On a machine that others use too, the best of many short runs says what the code costs.
        let mut runs: Vec<f64> = (0..40)
            .map(|_| {
                let start = std::time::Instant::now();
                for &(slot, size) in &draws {
                    heap.free(live[slot]).expect("a live block");
                    live[slot] = heap.malloc(size, S0, Tag(1, 2)).expect("memory");
                }
                start.elapsed().as_nanos() as f64 / draws.len() as f64
            })
            .collect();
        runs.sort_by(f64::total_cmp);
        println!("churn/{name}/{label}: best {:.1} ns, median {:.1} ns per malloc+free", runs[0], runs[20]);
        heap.check().expect("a sound heap");
    }
    group.finish();
}

fn benches(c: &mut Criterion) {
    let books = || BooksDriver::with_memory(140 << 30);
    pair(c, "books", books, &Config::gpu());
    churn(c, "books", books, &Config::gpu());
    let host = || HostDriver::with_memory(14 << 30);
    pair(c, "host", host, &Config::host());
    churn(c, "host", host, &Config::host());
}

criterion_group! {
    name = heap;
    config = Criterion::default().sample_size(20).measurement_time(std::time::Duration::from_secs(2));
    targets = benches
}
criterion_main!(heap);
