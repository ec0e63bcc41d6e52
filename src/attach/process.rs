//! The one state of a process: its heaps, ledgers, clock and judge, and what the entry points do with them.
//!
//! Invariants: the state is made once and never freed (frees may come after every destructor); each device
//! has one lock around its heap and its ledger; no lock is held while a stack is captured, while Python runs
//! or while a file is written; in a forked child nothing but a look at an address range is done.

use super::options::{self, Mode, Options};
use super::{say, say_once, signal};
use crate::driver::host::HostDriver;
use crate::driver::{Driver, Stream};
use crate::heap::{self, Heap, HeapError, Tag};
use crate::ledger::{Accounts, Clock, Judge};
use crate::stacks::{self, StackId};
use parking_lot::{Mutex, MutexGuard};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, Ordering};
use std::time::Duration;
