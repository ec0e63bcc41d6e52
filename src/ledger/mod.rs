//! Leak accounting: what is alive, since when, from where, and whether it accumulates.
//!
//! | file | job |
//! |---|---|
//! | [`clock`] | step, epoch, phase |
//! | [`tag`] | what a live block carries |
//! | [`cohort`] | live blocks by the step of their birth |
//! | [`history`] | thinned series |
//! | [`site`] | the counters of one stack |
//! | [`device`] | the books of one device at step boundaries |
//! | [`accounts`] | all of it for one device: born, died, boundary |
//! | [`trend`] | robust statistics |
//! | [`windows`] | minimum, mean and maximum over stretches of the run; what phases allocate and free |
//! | `pace` | whether survivors come at a steady pace or ever more rarely |
//! | `kept` | what a case keeps, and what an event leaves behind |
//! | [`pattern`] | how a site's survivors accumulate |
//! | `standing` | whether a site that accumulated still does |
//! | [`fragmentation`] | reserved grows, in use does not |
//! | [`findings`] | cases, answers, findings |
//! | [`stage`] | whether a case still grows, settled, or its stage of the program is over |
//! | [`judge`] | from patterns to findings, and back |
//! | `told` | what was said of a finding, and whether it must be said anew |
//! | [`host_memory`] | the process's memory that is no tensor's |
//! | [`notes`] | what grew and is no leak |
//! | [`undecided`] | growth that was not seen long enough |
//! | [`stayed`] | what came after the warm-up and stayed, whoever judged it |
//! | [`wire`] | the JSON of candidates and answers |
//! | [`symbols`] | what is asked of call stacks |
//!
//! Must not know: how stacks are captured, who allocates, how a report looks.
#![forbid(unsafe_code)]

pub mod accounts;
pub mod clock;
pub mod cohort;
pub mod device;
pub mod findings;
pub mod fragmentation;
pub mod history;
pub mod host_memory;
pub mod judge;
mod kept;
pub mod notes;
mod pace;
pub mod pattern;
mod requests;
pub mod site;
pub mod stage;
mod standing;
pub mod stayed;
pub mod symbols;
pub mod tag;
mod told;
pub mod trend;
pub mod undecided;
pub mod windows;
pub mod wire;

pub use accounts::Accounts;
pub use clock::{Clock, EpochStart, Now, OWN_PHASES, PHASE_NUMBERS, PHASES, Phase};
pub use device::Sample;
pub use findings::{Answer, Bounded, Case, Finding, Holder, Kept, State, Use};
pub use judge::Judge;
pub use pattern::{Class, Pattern, Shape};
pub use site::Site;
pub use symbols::{Frame, NoSymbols, Symbols};
pub use tag::Tag;
pub use told::Told;
pub use wire::LiveBlock;
