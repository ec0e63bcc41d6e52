//! A soak of the heap: random operations, and steps that repeat themselves, on a device that runs full and
//! whose calls fail at random.
//!
//! `cargo run --release --example heap_soak -- --operations 100000000 [--seed N]` prints how far it is once a
//! second. Every 64 operations all invariants are checked (`Heap::check`), at each free the block's size and
//! tag; at the end everything must have come back and the driver must never have been asked for nonsense. A
//! failure names the seed and the operation, and ends with 1.
#![allow(dead_code)]

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use strandline::driver::host::BooksDriver;
use strandline::driver::{DriverError, Stream};
use strandline::heap::{Address, Config, DriverWork, Heap, HeapError, PoolId, Tag};

const STREAMS: u64 = 4;

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

/// What a soak did.
#[derive(Debug, Default)]
pub struct Done {
    pub operations: u64,
    pub refused: u64,
    pub faults: u64,
    pub checks: u64,
    pub work: DriverWork,
}

struct Soak {
    random: Random,
    driver: BooksDriver,
    heap: Heap<BooksDriver>,
    live: Vec<(Address, u64, u64)>,
    /// Blocks of a step that repeats itself: they go in the order in which they came.
    step: VecDeque<(Address, u64, u64)>,
    place: u32,
    pools: u64,
    done: Done,
}

impl Soak {
    fn malloc(&mut self, site: u32, size: u64, stream: u64) -> Result<Option<(Address, u64, u64)>, String> {
        let mark = self.done.operations;
        match self.heap.malloc_from(site, size, Stream(stream), Tag(size, mark)) {
            Ok(at) => Ok(Some((at, size, mark))),
            Err(HeapError::OutOfMemory { .. } | HeapError::Driver(_)) => {
                self.done.refused += 1;
                // Room for what comes.
                for _ in 0..self.live.len() / 4 {
                    let index = self.random.below(self.live.len() as u64) as usize;
                    let block = self.live.swap_remove(index);
                    self.free(block)?;
                }
                Ok(None)
            }
            Err(other) => Err(other.to_string()),
        }
    }

    fn free(&mut self, (at, size, mark): (Address, u64, u64)) -> Result<(), String> {
        let freed = self.heap.free(at).map_err(|error| error.to_string())?;
        if (freed.requested, freed.tag) != (size, Tag(size, mark)) {
            return Err(format!("the block at {at:#x} came back as {freed:?}"));
        }
        Ok(())
    }

    /// One request, or one free, of a step whose sizes depend on the place in it and, a little, on chance.
    fn repeat(&mut self) -> Result<(), String> {
        self.place = (self.place + 1) % 24;
        let place = u64::from(self.place);
        if place % 2 == 1
            && let Some(block) = self.step.pop_front()
        {
            return self.free(block);
        }
        let size = (1 + place) * (3 << 19) + if place % 6 == 0 { self.random.below(1 << 22) } else { 0 };
        let block = self.malloc(1 + self.place, size, 0)?;
        self.step.extend(block);
        while self.step.len() > 8 {
            let block = self.step.pop_front().ok_or("an empty step")?;
            self.free(block)?;
        }
        Ok(())
    }

    fn any_index(&mut self) -> usize {
        self.random.below(self.live.len() as u64) as usize
    }

    fn operation(&mut self) -> Result<(), String> {
        match self.random.below(1000) {
            0..=299 => {
                let (size, stream) = (self.random.size(4, 28), self.random.below(STREAMS));
                let block = self.malloc(0, size, stream)?;
                self.live.extend(block);
            }
            300..=599 if !self.live.is_empty() => {
                let index = self.any_index();
                let block = self.live.swap_remove(index);
                self.free(block)?;
            }
            600..=879 => self.repeat()?,
            880..=909 if !self.live.is_empty() => {
                let (index, stream) = (self.any_index(), self.random.below(STREAMS));
                let at = self.live[index].0;
                self.heap.record_stream(at, Stream(stream)).map_err(|error| error.to_string())?;
            }
            910..=944 => self.driver.submit(Stream(self.random.below(STREAMS))),
            945..=985 => {
                let count = self.random.below(9);
                self.driver.complete(Stream(self.random.below(STREAMS)), count);
            }
            986..=989 => self.fault(DriverError::OutOfMemory),
            990..=992 => self.fault(DriverError::Failed { call: "any", code: 1 }),
            993 => _ = self.heap.trim(),
            994 => self.pool()?,
            995 => self.heap.set_limit(Some((200 + self.random.below(900)) << 20)),
            996 => self.heap.set_limit(None),
            _ => {
                let at = self.random.next();
                let known = self.live.iter().chain(&self.step).any(|block| block.0 == at);
                if !known && self.heap.free(at).is_ok() {
                    return Err(format!("{at:#x} was never handed out, but taken back"));
                }
            }
        }
        Ok(())
    }

    fn fault(&mut self, error: DriverError) {
        self.done.faults += 1;
        self.driver.fail(None, 1 + self.random.below(30), error);
    }

    fn pool(&mut self) -> Result<(), String> {
        self.pools += 1;
        let id = PoolId(self.pools, 0);
        let text = |error: HeapError| error.to_string();
        self.heap.begin_pool(id, Box::new(|stream| stream == Stream(3))).map_err(text)?;
        let block = self.malloc(0, 3 << 20, 3)?;
        self.live.extend(block);
        self.heap.end_pool(id).map_err(text)?;
        self.heap.release_pool(id).map_err(text)
    }

    fn check(&mut self) -> Result<(), String> {
        self.done.checks += 1;
        self.heap.check()?;
        match self.driver.violations() {
            0 => Ok(()),
            violations => Err(format!("the driver was asked for nonsense {violations} times")),
        }
    }

    /// Everything comes back.
    fn end(mut self) -> Result<Done, String> {
        self.driver.clear_faults();
        for block in std::mem::take(&mut self.live).into_iter().chain(std::mem::take(&mut self.step)) {
            self.free(block)?;
        }
        for stream in (0..STREAMS).cycle().take(4 * STREAMS as usize) {
            self.driver.complete(Stream(stream), u64::MAX);
        }
        self.heap.trim();
        self.check()?;
        let (reserved, active) = (self.heap.reserved(), self.heap.stats().active.all.current);
        if (reserved, active) != (0, 0) {
            return Err(format!("{reserved} bytes and {active} blocks did not come back"));
        }
        self.done.work = self.heap.stats().work;
        Ok(self.done)
    }
}

/// Runs a soak; `progress` is told the number of operations done now and then.
///
/// # Errors
/// The first promise that the heap did not keep, with the seed and the operation.
pub fn run(operations: u64, seed: u64, mut progress: impl FnMut(&Done)) -> Result<Done, String> {
    let driver = BooksDriver::with_memory(1 << 30);
    let heap = Heap::new(driver.clone(), Config::lean()).map_err(|error| error.to_string())?;
    let mut soak = Soak {
        random: Random(seed),
        driver,
        heap,
        live: Vec::new(),
        step: VecDeque::new(),
        place: 0,
        pools: 0,
        done: Done::default(),
    };
    let named = |operation: u64, why: String| format!("seed {seed}, operation {operation}: {why}");
    for operation in 0..operations {
        soak.done.operations = operation;
        soak.operation().map_err(|why| named(operation, why))?;
        if operation % 64 == 0 {
            soak.check().map_err(|why| named(operation, why))?;
            progress(&soak.done);
        }
    }
    soak.done.operations = operations;
    soak.end().map_err(|why| named(operations, why))
}

fn number(arguments: &[String], name: &str, default: u64) -> Result<u64, String> {
    match arguments.iter().position(|argument| argument == name) {
        None => Ok(default),
        Some(place) => arguments
            .get(place + 1)
            .and_then(|value| value.replace('_', "").parse().ok())
            .ok_or(format!("{name} needs a number")),
    }
}

fn main() -> std::process::ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let wanted = number(&arguments, "--operations", 10_000_000)
        .and_then(|operations| Ok((operations, number(&arguments, "--seed", 1)?)));
    let (operations, seed) = match wanted {
        Ok(wanted) => wanted,
        Err(why) => {
            eprintln!("heap_soak: {why}");
            return 2.into();
        }
    };
    let (start, mut said) = (Instant::now(), Instant::now());
    let rate = |done: u64| done as f64 / start.elapsed().as_secs_f64();
    let result = run(operations, seed, |done| {
        if said.elapsed() >= Duration::from_secs(1) {
            said = Instant::now();
            let percent = done.operations * 100 / operations.max(1);
            eprint!(
                "\r{percent:3} %  {} of {operations} operations, {:.0}/s ",
                done.operations,
                rate(done.operations)
            );
        }
    });
    eprintln!();
    match result {
        Ok(done) => {
            println!(
                "{operations} operations from seed {seed} in {:.0} s ({:.0}/s): no promise broken; {} checks, {} \
                 faults, {} requests refused; {} handles made, {} mapped again, {} called back, {} requests retraced",
                start.elapsed().as_secs_f64(),
                rate(operations),
                done.checks,
                done.faults,
                done.refused,
                done.work.creates,
                done.work.stitched,
                done.work.called_back,
                done.work.retraced,
            );
            0.into()
        }
        Err(why) => {
            eprintln!("heap_soak: {why}");
            1.into()
        }
    }
}
