//! A soak: random operations on a device that runs full, with faults.
//!
//! `STRANDLINE_SOAK_OPS=10000000 STRANDLINE_SOAK_SEED=7 cargo test --release --test heap_random` runs long; the default
//! is short. A failure names the seed.

use strandline::driver::host::BooksDriver;
use strandline::driver::{DriverError, Stream};
use strandline::heap::{Address, Config, Heap, HeapError, PoolId, Tag};

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

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    /// Log-uniform from 2^low to 2^high.
    fn size(&mut self, low: u64, high: u64) -> u64 {
        let bits = low + self.below(high - low);
        (1 << bits) + self.below(1 << bits)
    }
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(default)
}

#[test]
fn random_operations_keep_the_heap_sound() {
    let (count, seed) = (number("STRANDLINE_SOAK_OPS", 30_000), number("STRANDLINE_SOAK_SEED", 1));
    println!("{count} operations from seed {seed}");
    let mut random = Random(seed);
    let driver = BooksDriver::with_memory(1 << 30);
    let mut heap = Heap::new(driver.clone(), Config::gpu()).expect("a heap");
    let mut live: Vec<(Address, u64)> = Vec::new();
    let (mut refused, mut pool) = (0u64, 0u64);
    for op in 0..count {
        match random.below(1000) {
            0..=449 => {
                let size = random.size(4, 28);
                match heap.malloc(size, Stream(random.below(4)), Tag(size, op)) {
                    Ok(at) => live.push((at, size)),
                    Err(HeapError::OutOfMemory { .. } | HeapError::Driver(_)) => {
                        refused += 1;
                        // Room for what comes.
                        for _ in 0..live.len() / 4 {
                            let index = random.below(live.len() as u64) as usize;
                            heap.free(live.swap_remove(index).0).expect("a live block");
                        }
                    }
                    Err(other) => panic!("seed {seed}, operation {op}: {other}"),
                }
            }
            450..=889 if !live.is_empty() => {
                let index = random.below(live.len() as u64) as usize;
                let (at, size) = live.swap_remove(index);
                assert_eq!(heap.free(at).expect("a live block").requested, size);
            }
            890..=919 if !live.is_empty() => {
                let index = random.below(live.len() as u64) as usize;
                heap.record_stream(live[index].0, Stream(random.below(4))).expect("a live block");
            }
            920..=949 => driver.submit(Stream(random.below(4))),
            950..=985 => {
                driver.complete(Stream(random.below(4)), random.below(9));
            }
            986..=989 => driver.fail(None, 1 + random.below(30), DriverError::OutOfMemory),
            990..=992 => {
                driver.fail(None, 1 + random.below(30), DriverError::Failed { call: "any", code: 1 });
            }
            993 => {
                heap.trim();
            }
            994 => {
                pool += 1;
                let id = PoolId(pool, 0);
                heap.begin_pool(id, Box::new(|stream| stream == Stream(3))).expect("a new pool");
                if let Ok(at) = heap.malloc(3 << 20, Stream(3), Tag(3 << 20, op)) {
                    live.push((at, 3 << 20));
                }
                heap.end_pool(id).expect("the pool");
                heap.release_pool(id).expect("the pool");
            }
            995 => heap.set_limit(Some((200 + random.below(900)) << 20)),
            996 => heap.set_limit(None),
            _ => {
                let at = random.next();
                assert!(live.iter().any(|live| live.0 == at) || heap.free(at).is_err());
            }
        }
        if op % 64 == 0
            && let Err(error) = heap.check()
        {
            panic!("seed {seed}, operation {op}: {error}");
        }
    }
    driver.clear_faults();
    for (at, _) in live {
        heap.free(at).expect("a live block");
    }
    for _ in 0..4 {
        for stream in 0..4 {
            driver.complete(Stream(stream), u64::MAX);
        }
    }
    heap.trim();
    heap.check().expect("a sound heap");
    assert_eq!((heap.reserved(), driver.violations()), (0, 0), "seed {seed}, {refused} refused");
}
