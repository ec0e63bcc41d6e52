//! What accounting costs: a birth and a death, a step boundary, a look of the judge, a report's copy.
//! `cargo bench --bench ledger`. Times are the thread's own CPU time, so that a busy machine does not distort them.

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use std::hint::black_box;
use std::time::Duration;
use strandline::ledger::{Accounts, Clock, Judge, Now, Sample, Tag};
use strandline::report::DeviceView;

/// CPU time of this thread.
fn spent() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid, writable timespec for the duration of the call.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn at(step: u32) -> Now {
    Now { step, ..Now::default() }
}

/// Live blocks of 200 sites, one of which is replaced at each operation.
fn born_and_died(c: &mut Criterion) {
    let mut accounts = Accounts::new(0);
    let mut live: Vec<(Tag, u64)> = (0..2_000).map(|n| (accounts.born(n % 200, 4096, at(0)), 4096)).collect();
    let mut random = 1u64;
    c.bench_function("born+died, 2,000 live blocks of 200 sites, one step", |b| {
        b.iter_custom(|times| {
            let start = spent();
            for _ in 0..times {
                random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                let slot = (random >> 33) as usize % live.len();
                let (tag, size) = live[slot];
                accounts.died(tag, size, at(0));
                live[slot] = (accounts.born((random >> 50) as u32 % 200, 4096, at(0)), 4096);
            }
            spent() - start
        });
    });
    c.bench_function("born+died at once, one site", |b| {
        b.iter_custom(|times| {
            let start = spent();
            for _ in 0..times {
                let tag = accounts.born(black_box(7), 512, at(0));
                accounts.died(tag, 512, at(0));
            }
            spent() - start
        });
    });
}

/// `sites` known sites, of which `changing` allocate and free in every step; one leaks.
fn job(sites: u32) -> (Accounts, Clock, Judge) {
    let mut accounts = Accounts::new(0);
    for stack in 0..sites {
        accounts.born(stack, 4096, at(0));
    }
    let (clock, mut judge) = (Clock::new(), Judge::new());
    for _ in 0..8 {
        let ended = clock.end_step(0);
        accounts.boundary(ended, 0, &Sample::default());
        judge.look(&mut accounts, &clock);
    }
    (accounts, clock, judge)
}

fn boundary(c: &mut Criterion) {
    for (sites, changing) in [(10_000, 100), (10_000, 1_000), (300, 300)] {
        let (mut accounts, clock, mut judge) = job(sites);
        let name = format!("boundary and look, {sites} sites, {changing} changed");
        c.bench_function(&name, |b| {
            b.iter_custom(|times| {
                let mut total = Duration::ZERO;
                for _ in 0..times {
                    let now = clock.now();
                    for stack in 0..changing {
                        let tag = accounts.born(stack, 4096, now);
                        accounts.died(tag, 4096, now);
                    }
                    let start = spent();
                    let ended = clock.end_step(0);
                    accounts.boundary(ended, 0, &Sample::default());
                    black_box(judge.look(&mut accounts, &clock));
                    total += spent() - start;
                }
                total
            });
        });
    }
    c.bench_function("boundary and look, 1,000 sites leak in every step", |b| {
        let (mut accounts, clock, mut judge) = job(1_000);
        b.iter_custom(|times| {
            let mut total = Duration::ZERO;
            for _ in 0..times {
                let now = clock.now();
                for stack in 0..1_000 {
                    accounts.born(stack, 4096, now);
                }
                let start = spent();
                let ended = clock.end_step(0);
                accounts.boundary(ended, 0, &Sample::default());
                black_box(judge.look(&mut accounts, &clock));
                total += spent() - start;
            }
            total
        });
    });
}

/// A stage in which all of 10,000 sites allocated, `leaking` of them for good, is over: what stopped is asked about.
fn after_a_stage(c: &mut Criterion) {
    for leaking in [1, 100] {
        let (mut accounts, clock, mut judge) = job(10_000);
        let step = |accounts: &mut Accounts, judge: &mut Judge, stacks: std::ops::Range<u32>, keep: u32| {
            let now = clock.now();
            for stack in stacks {
                let tag = accounts.born(stack, 4096, now);
                if stack >= keep {
                    accounts.died(tag, 4096, now);
                }
            }
            let start = spent();
            let ended = clock.end_step(0);
            accounts.boundary(ended, 0, &Sample::default());
            black_box(judge.look(accounts, &clock));
            spent() - start
        };
        for at in 0..100 {
            let (stacks, keep) = if at < 60 { (0..10_000, leaking) } else { (9_900..10_000, 0) };
            step(&mut accounts, &mut judge, stacks, keep);
        }
        c.bench_function(
            &format!("boundary and look, 10,000 sites, {leaking} stopped with their stage"),
            |b| {
                b.iter_custom(|times| {
                    (0..times).map(|_| step(&mut accounts, &mut judge, 9_900..10_000, 0)).sum()
                });
            },
        );
    }
}

fn view(c: &mut Criterion) {
    let (accounts, _, judge) = job(10_000);
    c.bench_function("copy for a report, 10,000 sites", |b| {
        b.iter_batched(
            || judge.wanted(0),
            |wanted| DeviceView::of(&accounts, &wanted),
            BatchSize::SmallInput,
        );
    });
}

criterion_group! {
    name = ledger;
    config = Criterion::default().sample_size(30).measurement_time(Duration::from_secs(2))
        .warm_up_time(Duration::from_millis(500));
    targets = born_and_died, boundary, after_a_stage, view
}
criterion_main!(ledger);
