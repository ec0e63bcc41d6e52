//! Native frames of the own thread: framehop on x86-64, the C runtime's unwinder elsewhere.
//!
//! Must not know Python, nor any name: a frame is a return address. Invariant: nothing is allocated while
//! unwinding, and nothing outside the thread's own stack is read as stack, however corrupt it is.

use super::raw::RawFrame;

/// One thread's part: the list of shared objects that it last saw, framehop's cache of unwind rules, and
/// the bounds of its stack.
#[derive(Default)]
pub struct Unwinder {
    #[cfg(target_arch = "x86_64")]
    fast: fast::Fast,
}

/// Where to stop: native frames from this range of code on are of no interest.
pub type Until = std::ops::Range<u64>;

impl Unwinder {
    pub fn new() -> Unwinder {
        Unwinder::default()
    }

    /// Writes the innermost `depth` return addresses to `out`, and the marker if there are more (`out`
    /// has room for one more than `depth`). Ends before the first frame in `until`.
    pub fn walk(&mut self, depth: usize, until: &Until, out: &mut [RawFrame]) -> usize {
        #[cfg(target_arch = "x86_64")]
        {
            let frames = self.fast.walk(depth, until, out);
            if frames != 0 {
                return frames;
            }
        }
        runtime::walk(depth, until, out)
    }
}

/// Adds an address; says whether there is room for another.
#[inline(always)]
fn keep(frames: &mut usize, depth: usize, address: u64, until: &Until, out: &mut [RawFrame]) -> bool {
    if until.contains(&address) {
        return false;
    }
    let Some(slot) = out.get_mut(*frames) else { return false };
    let more = *frames < depth;
    *slot = if more { RawFrame::native(address) } else { RawFrame::cut() };
    *frames += 1;
    more
}

#[cfg(target_arch = "x86_64")]
mod fast {
    use std::arch::asm;
    use std::sync::Arc;

    use framehop::x86_64::{CacheX86_64, UnwindRegsX86_64};
    use framehop::{FrameAddress, MustNotAllocateDuringUnwind, Unwinder as _};

    use super::super::native_modules::{Modules, counters, current};
    use super::super::raw::RawFrame;
    use super::{Until, keep};

    #[derive(Default)]
    pub struct Fast {
        modules: Option<Arc<Modules>>,
        cache: Option<Box<CacheX86_64<MustNotAllocateDuringUnwind>>>,
        /// End of the thread's stack (it grows downwards); 0 until it was asked for.
        stack_end: u64,
    }

    impl Fast {
        #[inline(never)]
        pub fn walk(&mut self, depth: usize, until: &Until, out: &mut [RawFrame]) -> usize {
            let counters = counters();
            if self.modules.as_ref().is_none_or(|modules| modules.counters != counters) {
                self.modules = Some(current(counters));
                self.cache = Some(Box::new(CacheX86_64::new_in()));
            }
            if self.stack_end == 0 {
                self.stack_end = stack_end();
            }
            let (Some(modules), Some(cache)) = (&self.modules, &mut self.cache) else { return 0 };
            let (ip, sp, bp): (u64, u64, u64);
            // SAFETY: reads three registers into others; no memory, no flags, no stack.
            unsafe {
                asm!("lea {ip}, [rip]", "mov {sp}, rsp", "mov {bp}, rbp",
                     ip = out(reg) ip, sp = out(reg) sp, bp = out(reg) bp,
                     options(nomem, nostack, preserves_flags));
            }
            let end = self.stack_end;
            // A coroutine's stack is none that can be bounded.
            if sp >= end {
                return 0;
            }
            let mut read = |address: u64| {
                if address < sp || address & 7 != 0 || address > end - 8 {
                    return Err(());
                }
                // SAFETY: aligned, and between this frame and the end of the thread's stack, all of which
                // is mapped while the thread runs.
                Ok(unsafe { (address as *const u64).read() })
            };
            let mut registers = UnwindRegsX86_64::new(ip, sp, bp);
            let mut at = FrameAddress::from_instruction_pointer(ip);
            let mut frames = 0;
            // Twice the depth covers our own frames, which are left out; a loop in a corrupt stack ends.
            for _ in 0..depth * 2 + 16 {
                let address = at.address();
                let own = frames == 0 && address >= modules.own.0 && address < modules.own.1;
                if !own && !keep(&mut frames, depth, address, until, out) {
                    break;
                }
                let before = registers.sp();
                let Ok(Some(caller)) = modules.tables.unwind_frame(at, &mut registers, cache, &mut read)
                else {
                    break;
                };
                let Some(next) = FrameAddress::from_return_address(caller) else { break };
                // Callers lie further up, always.
                if registers.sp() <= before {
                    break;
                }
                at = next;
            }
            frames
        }
    }

    /// The highest address of the calling thread's stack. Reads /proc/self/maps in the main thread, so
    /// it is asked for once.
    #[cold]
    fn stack_end() -> u64 {
        // SAFETY: an attribute object that is filled in before it is read, and destroyed.
        unsafe {
            let mut attributes: libc::pthread_attr_t = std::mem::zeroed();
            if libc::pthread_getattr_np(libc::pthread_self(), &raw mut attributes) != 0 {
                return 0;
            }
            let (mut start, mut size) = (std::ptr::null_mut(), 0usize);
            let got = libc::pthread_attr_getstack(&raw const attributes, &raw mut start, &raw mut size);
            libc::pthread_attr_destroy(&raw mut attributes);
            if got == 0 { start as u64 + size as u64 } else { 0 }
        }
    }
}

/// The unwinder that exceptions use: slower by ten, but everywhere.
mod runtime {
    use std::ffi::{c_int, c_void};

    use super::super::raw::RawFrame;
    use super::{Until, keep};

    unsafe extern "C" {
        fn _Unwind_Backtrace(
            each: extern "C" fn(*mut c_void, *mut c_void) -> c_int,
            data: *mut c_void,
        ) -> c_int;
        fn _Unwind_GetIP(context: *mut c_void) -> usize;
    }

    struct Walk<'a> {
        frames: usize,
        depth: usize,
        until: &'a Until,
        out: &'a mut [RawFrame],
    }

    pub fn walk(depth: usize, until: &Until, out: &mut [RawFrame]) -> usize {
        extern "C" fn each(context: *mut c_void, data: *mut c_void) -> c_int {
            const GO_ON: c_int = 0;
            const END_OF_STACK: c_int = 5;
            // SAFETY: `data` is the `Walk` below, and the unwinder lends `context` for the call.
            let (walk, address) = unsafe { (&mut *data.cast::<Walk>(), _Unwind_GetIP(context)) };
            let Walk { frames, depth, until, out } = walk;
            if address != 0 && keep(frames, *depth, address as u64, until, out) {
                GO_ON
            } else {
                END_OF_STACK
            }
        }
        let mut walk = Walk { frames: 0, depth, until, out };
        // SAFETY: `each` matches the declared type, does not unwind, and `walk` outlives the call.
        unsafe { _Unwind_Backtrace(each, (&raw mut walk).cast()) };
        walk.frames
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Until = 0..0;

    #[inline(never)]
    fn down(depth: u32, work: &mut dyn FnMut()) {
        if depth == 0 {
            work();
        } else {
            down(depth - 1, work);
            std::hint::black_box(depth);
        }
    }

    fn addresses(frames: &[RawFrame]) -> Vec<u64> {
        frames.iter().map(|frame| frame.place).collect()
    }

    #[test]
    fn both_unwinders_agree() {
        let mut out = [[RawFrame::default(); 200]; 2];
        let mut counts = [0; 2];
        let mut unwinder = Unwinder::new();
        down(20, &mut || {
            counts[0] = unwinder.walk(100, &ALL, &mut out[0]);
            counts[1] = runtime::walk(100, &ALL, &mut out[1]);
        });
        let (a, b) = (addresses(&out[0][..counts[0]]), addresses(&out[1][..counts[1]]));
        // The innermost few are the unwinders' own, and differ.
        let common = a.iter().rev().zip(b.iter().rev()).take_while(|(a, b)| a == b).count();
        assert!(common >= 24, "{common} common frames\n{a:x?}\n{b:x?}");
    }

    #[test]
    fn deep_stacks_are_cut_and_marked() {
        let mut out = [RawFrame::default(); 11];
        let mut frames = 0;
        down(50, &mut || frames = Unwinder::new().walk(10, &ALL, &mut out));
        assert_eq!(frames, 11);
        assert!(out[10].is_cut() && out[..10].iter().all(|frame| frame.is_native()));
    }

    #[test]
    fn the_walk_ends_where_it_is_told() {
        let mut out = [RawFrame::default(); 201];
        let mut whole = 0;
        let mut part = 0;
        let mut cut = [RawFrame::default(); 201];
        down(5, &mut || {
            whole = Unwinder::new().walk(200, &ALL, &mut out);
            let place = out[whole - 3].place;
            part = Unwinder::new().walk(200, &(place..place + 1), &mut cut);
        });
        assert_eq!(part, whole - 3);
    }

    #[test]
    fn a_small_thread_is_enough() {
        std::thread::Builder::new()
            .stack_size(128 << 10)
            .spawn(|| {
                let mut out = [RawFrame::default(); 65];
                assert!(Unwinder::new().walk(64, &ALL, &mut out) >= 3);
            })
            .unwrap()
            .join()
            .unwrap();
    }
}
