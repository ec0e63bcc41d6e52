//! A short run of the soak in `examples/heap_soak.rs`, which says what it does and how to run it long.

#[path = "../examples/heap_soak.rs"]
mod heap_soak;

#[test]
fn random_operations_keep_the_heap_sound() {
    for seed in 1..4 {
        let done = heap_soak::run(20_000, seed, |_| {}).unwrap_or_else(|why| panic!("{why}"));
        assert!(done.work.stitched > 0 && done.faults > 0 && done.work.called_back > 0, "{done:?}");
    }
}
