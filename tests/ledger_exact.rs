//! Counters are exact, memory is bounded, boundaries visit only what changed.

mod ledger_sim;
use ledger_sim::Rng;
use proptest::prelude::*;
use std::collections::HashMap;
use strandline::ledger::site::SITE_BYTES;
use strandline::ledger::{Accounts, Now, Phase, Sample, Tag};

#[derive(Clone, Debug)]
enum Event {
    Born { stack: u32, size: u64, phase: u32 },
    Died { which: usize },
    Again { which: usize },
    Step,
    Race,
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        6 => (0u32..12, 1u64..1 << 30, 0u32..5).prop_map(|(stack, size, phase)| Event::Born { stack, size, phase }),
        5 => any::<usize>().prop_map(|which| Event::Died { which }),
        1 => any::<usize>().prop_map(|which| Event::Again { which }),
        2 => Just(Event::Step),
        1 => Just(Event::Race),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    /// Against a model that keeps every block.
    #[test]
    fn counters_match_a_simple_model(events in prop::collection::vec(event(), 1..1500)) {
        let mut accounts = Accounts::new(0);
        let mut live: Vec<(Tag, u32, u64)> = Vec::new();
        let mut dead: Vec<(Tag, u32, u64)> = Vec::new();
        let mut born: HashMap<u32, (u64, u64)> = HashMap::new();
        let (mut step, mut peak, mut bytes) = (0u32, 0u64, 0u64);
        for event in events {
            match event {
                Event::Born { stack, size, phase } => {
                    let now = Now { step, epoch: step / 7, phase: Phase::from_number(phase).unwrap(), ..Now::default() };
                    let tag = accounts.born(stack, size, now);
                    prop_assert_eq!((tag.step(), tag.epoch(), tag.phase()), (step, step / 7, now.phase));
                    live.push((tag, stack, size));
                    let total = born.entry(stack).or_default();
                    *total = (total.0 + 1, total.1 + size);
                    bytes += size;
                    peak = peak.max(bytes);
                }
                Event::Died { which } if !live.is_empty() => {
                    let block @ (tag, _, size) = live.swap_remove(which % live.len());
                    accounts.died(tag, size, Now { step, ..Now::default() });
                    bytes -= size;
                    dead.push(block);
                }
                // With the tag that it had: of the step in which it was born.
                Event::Again { which } if !dead.is_empty() => {
                    let block @ (tag, stack, size) = dead.swap_remove(which % dead.len());
                    accounts.revived(tag, size, Now { step, ..Now::default() });
                    live.push(block);
                    let total = born.entry(stack).or_default();
                    *total = (total.0 + 1, total.1 + size);
                    bytes += size;
                    peak = peak.max(bytes);
                    let site = &accounts.sites()[accounts.site_of(stack).unwrap() as usize];
                    prop_assert!(site.cohorts.iter().any(|c| (c.first..=c.last).contains(&tag.step())));
                }
                Event::Again { .. } => {}
                Event::Died { .. } => {}
                Event::Step => {
                    accounts.boundary(step, step / 7, &Sample { allocated: bytes, ..Sample::default() });
                    step += 1;
                }
                // Another thread still reads the step before: it counts for the running one.
                Event::Race => {
                    let late = Now { step: step.saturating_sub(1), ..Now::default() };
                    let tag = accounts.born(3, 5, late);
                    accounts.died(tag, 5, late);
                    let total = born.entry(3).or_default();
                    *total = (total.0 + 1, total.1 + 5);
                    peak = peak.max(bytes + 5);
                }
            }
        }
        accounts.check();
        prop_assert_eq!(accounts.live_blocks(), live.len() as u64);
        prop_assert_eq!(accounts.live_bytes(), bytes);
        for (stack, total) in born {
            let site = &accounts.sites()[accounts.site_of(stack).unwrap() as usize];
            let mine: Vec<u64> = live.iter().filter(|block| block.1 == stack).map(|block| block.2).collect();
            prop_assert_eq!((site.born_blocks, site.born_bytes), total);
            prop_assert_eq!((site.live_blocks, site.live_bytes), (mine.len() as u64, mine.iter().sum()));
            prop_assert_eq!(site.freed_blocks(), total.0 - mine.len() as u64);
        }
        accounts.boundary(step, 0, &Sample::default());
        prop_assert_eq!(accounts.books().peak().0, peak);
    }
}

#[test]
fn recent_births_are_known_exactly_after_a_long_run() {
    let mut accounts = Accounts::new(0);
    let mut rng = Rng(7);
    let mut births = Vec::new();
    for step in 0..50_000 {
        let now = Now { step, ..Now::default() };
        if rng.chance(0.3) {
            accounts.born(1, 512, now);
            births.push(step);
        }
        accounts.boundary(step, 0, &Sample::default());
    }
    let site = &accounts.sites()[0];
    let recent: Vec<u32> = site.cohorts.iter().rev().take(11).map(|c| c.first).collect();
    assert_eq!(recent, births.iter().rev().take(11).copied().collect::<Vec<_>>());
    assert_eq!(site.cohorts.iter().map(|c| c.events()).sum::<u32>() as usize, births.len());
}

#[test]
fn a_site_takes_at_most_a_kibibyte() {
    let mut accounts = Accounts::new(0);
    let sites = 1 << 13;
    for step in 0..200u32 {
        let now = Now { step, ..Now::default() };
        for stack in 0..sites {
            accounts.born(stack, 512, now);
        }
        accounts.boundary(step, 0, &Sample::default());
    }
    let each = accounts.memory_bytes() / sites as usize;
    println!("{each} bytes per site at most (every site leaks in every step)");
    assert!(each <= SITE_BYTES, "{each}");
}

#[test]
fn sites_are_bounded() {
    let mut accounts = Accounts::new(0);
    let mut tags = Vec::new();
    let most = strandline::ledger::accounts::MAX_SITES as u32;
    for stack in 1..most + 5_000 {
        tags.push(accounts.born(stack, 1, Now::default()));
    }
    assert!(accounts.sites().len() as u32 <= most + 1);
    tags.into_iter().for_each(|tag| accounts.died(tag, 1, Now::default()));
    accounts.check();
    assert_eq!(accounts.live_bytes(), 0);
}
