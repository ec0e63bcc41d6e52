//! How many instructions malloc and free take, counted by callgrind: a figure that no other load of the machine
//! changes. The work is that of `heap`: *pair* and *churn*.
//!
//! `cargo bench --bench instructions` prints instructions per malloc+free, of the heap and of PyTorch's own
//! algorithm over the same driver. The bench runs itself under `valgrind --tool=callgrind`, once for half of the
//! operations and once for all: the difference is what the operations cost. It ends with 1 where valgrind is not
//! installed.

use std::env;
use std::path::Path;
use std::process::{Command, ExitCode};

use strandline::driver::host::{BooksDriver, HostDriver};
use strandline::heap::{Config, Heap};
use work::{Allocator, Churn, S0};
use yardstick::Yardstick;

mod work;
mod yardstick;

/// Operations of the longer run.
const OPERATIONS: usize = 200_000;
const ALLOCATORS: [&str; 4] = ["books", "host", "torch native", "torch expandable"];
const WORKS: [&str; 5] = ["pair 4KiB", "pair 64KiB", "pair 4MiB", "churn small", "churn mixed"];
/// The environment's word for the work of a process under callgrind: ALLOCATOR/WORK/OPERATIONS.
const WORK: &str = "STRANDLINE_BENCH_WORK";

fn pair(mut heap: impl Allocator, size: u64, operations: usize) {
    for _ in 0..operations {
        let at = heap.get(size, S0);
        heap.put(at);
    }
}

fn churn(heap: impl Allocator, largest: f64, operations: usize) {
    let mut churn = Churn::new(heap, largest);
    (0..operations).for_each(|_| churn.turn());
}

fn work(heap: impl Allocator, name: &str, operations: usize) {
    match name {
        "pair 4KiB" => pair(heap, 4 << 10, operations),
        "pair 64KiB" => pair(heap, 64 << 10, operations),
        "pair 4MiB" => pair(heap, 4 << 20, operations),
        "churn small" => churn(heap, 512.0 * 1024.0, operations),
        "churn mixed" => churn(heap, 16.0 * 1024.0 * 1024.0, operations),
        other => panic!("no work is called {other}"),
    }
}

/// What the process under callgrind does.
fn perform(order: &str) {
    let mut words = order.split('/');
    let (Some(allocator), Some(name), Some(operations)) = (words.next(), words.next(), words.next()) else {
        panic!("{WORK}={order} is not ALLOCATOR/WORK/OPERATIONS");
    };
    let operations = operations.parse().expect("a number of operations");
    let books = || BooksDriver::with_memory(140 << 30);
    match allocator {
        "books" => work(Heap::new(books(), Config::lean()).expect("a heap"), name, operations),
        "host" => {
            let driver = HostDriver::with_memory(14 << 30);
            work(Heap::new(driver, Config::host()).expect("a heap"), name, operations);
        }
        "torch native" => work(Yardstick::new(books(), false), name, operations),
        "torch expandable" => work(Yardstick::new(books(), true), name, operations),
        other => panic!("no allocator is called {other}"),
    }
}

/// The instructions of a whole process that does the work.
fn counted(allocator: &str, name: &str, operations: usize, folder: &Path) -> Result<u64, String> {
    let out = folder.join("callgrind.out");
    let done = Command::new("valgrind")
        .args(["--tool=callgrind", "--quiet"])
        .arg(format!("--callgrind-out-file={}", out.display()))
        .arg(env::current_exe().map_err(|error| error.to_string())?)
        .env(WORK, format!("{allocator}/{name}/{operations}"))
        .output()
        .map_err(|error| format!("valgrind does not start ({error}); install it (apt install valgrind)"))?;
    if !done.status.success() {
        return Err(format!("valgrind: {}: {}", done.status, String::from_utf8_lossy(&done.stderr)));
    }
    let text = std::fs::read_to_string(&out).map_err(|error| format!("{}: {error}", out.display()))?;
    text.lines()
        .find_map(|line| line.strip_prefix("summary: ").or_else(|| line.strip_prefix("totals: ")))
        .and_then(|figure| figure.trim().parse().ok())
        .ok_or_else(|| format!("{}: callgrind wrote no total", out.display()))
}

fn table() -> Result<(), String> {
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    print!("{:24}", "instructions per pair");
    WORKS.iter().for_each(|name| print!("{name:>13}"));
    println!();
    for allocator in ALLOCATORS {
        print!("{allocator:24}");
        for name in WORKS {
            let half = counted(allocator, name, OPERATIONS / 2, folder.path())?;
            let all = counted(allocator, name, OPERATIONS, folder.path())?;
            print!("{:>13.0}", (all - half) as f64 / (OPERATIONS / 2) as f64);
        }
        println!();
    }
    Ok(())
}

fn main() -> ExitCode {
    if let Ok(order) = env::var(WORK) {
        perform(&order);
        return ExitCode::SUCCESS;
    }
    match table() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("instructions: {error}");
            ExitCode::FAILURE
        }
    }
}
