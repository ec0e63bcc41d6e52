//! What the environment asks for. Reads `STRANDLINE_*` once; must not touch anything else of the process.
//!
//! `strandline run` sets these variables; a user who preloads the library by hand may set them too.

use super::conf::Conf;
use super::metrics::Listen;
use super::spelling;
use std::ffi::OsString;
use std::path::PathBuf;

/// Where events come from; `Auto` is decided when torch is imported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Mode {
    /// Nothing is served and nothing is watched.
    Off = 0,
    /// strandline's heap is the GPU's allocator.
    Heap = 1,
    /// torch's native allocator is watched.
    Observer = 2,
    /// CPU tensors are served from strandline's heap over host memory.
    Host = 3,
}

impl Mode {
    /// The word used in options and reports.
    pub fn word(self) -> &'static str {
        match self {
            Mode::Off => "off",
            Mode::Heap => "heap",
            Mode::Observer => "observer",
            Mode::Host => "host",
        }
    }

    /// The mode of a number of the C ABI.
    pub fn from_abi(mode: i32) -> Option<Mode> {
        [Mode::Off, Mode::Heap, Mode::Observer, Mode::Host].into_iter().find(|m| *m as i32 == mode)
    }
}

/// The options of this process.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Folder for reports (`STRANDLINE_OUT`), `strandline-out` in the working directory by default.
    pub out: Option<PathBuf>,
    /// Nothing on stderr except what must be said (`STRANDLINE_QUIET=1`).
    pub quiet: bool,
    /// Writes outside of live blocks are looked for (`STRANDLINE_GUARD=1`), in host memory.
    pub guard: bool,
    /// A report every so many steps (`STRANDLINE_EVERY`), 0 for never.
    pub every: u32,
    /// The signal that asks for a report (`STRANDLINE_SIGNAL`): `Some(0)` for none, `None` for the default.
    pub signal: Option<i32>,
    /// The library that findings and sites shown must have on their stack (`STRANDLINE_FOCUS`, or `focus:` in
    /// `STRANDLINE_CONF`).
    pub focus: Option<String>,
    /// Metrics for a scraper (`STRANDLINE_CONF=openmetrics:FILE`), rewritten as the job goes on.
    pub openmetrics: Option<PathBuf>,
    /// Where a scraper may ask for metrics (`STRANDLINE_CONF=openmetrics_listen:[ADDR:]PORT`).
    pub openmetrics_listen: Option<Listen>,
    /// Whether a control socket is opened (not with `STRANDLINE_CONTROL=off`).
    pub control: bool,
    /// Whether a report is written when the job crashes (not with `STRANDLINE_CRASH=off`).
    pub crash: bool,
}

impl Options {
    /// Reads the environment. Returns the options and what in them could not be understood.
    pub fn from_env() -> (Options, Vec<String>) {
        let (mut options, mut wrong) = Self::from_lookup(|name| std::env::var_os(name));
        let conf = Conf::of_this_process();
        options.focus = options.focus.or_else(|| conf.focus.clone());
        options.openmetrics.clone_from(&conf.openmetrics);
        options.openmetrics_listen = conf.openmetrics_listen;
        wrong.extend_from_slice(Conf::faults());
        wrong.extend(std::env::vars_os().filter_map(|(name, _)| unknown(name.to_str()?)));
        (options, wrong)
    }

    fn from_lookup(get: impl Fn(&str) -> Option<OsString>) -> (Options, Vec<String>) {
        let mut wrong = Vec::new();
        let text = |name: &str| get(name).map(|v| v.to_string_lossy().into_owned()).filter(|v| !v.is_empty());
        let mut switch = |name: &str, usual: bool| {
            let Some(value) = text(name) else { return usual };
            switched(&value).unwrap_or_else(|| {
                let kept = if usual { "on" } else { "off" };
                wrong.push(format!("{name}={value} is neither on (1) nor off (0); it stays {kept}"));
                usual
            })
        };
        let mut options = Options {
            out: get("STRANDLINE_OUT").filter(|v| !v.is_empty()).map(PathBuf::from),
            quiet: switch("STRANDLINE_QUIET", false),
            control: switch("STRANDLINE_CONTROL", true),
            crash: switch("STRANDLINE_CRASH", true),
            guard: switch("STRANDLINE_GUARD", false),
            focus: text("STRANDLINE_FOCUS"),
            ..Options::default()
        };
        if let Some(every) = text("STRANDLINE_EVERY") {
            match every.parse() {
                Ok(n) => options.every = n,
                Err(_) => wrong.push(format!("STRANDLINE_EVERY={every} is not a number of steps; ignored")),
            }
        }
        if let Some(signal) = text("STRANDLINE_SIGNAL") {
            options.signal = signal_number(&signal);
            if options.signal.is_none() {
                wrong.push(format!(
                    "STRANDLINE_SIGNAL={signal} is neither a signal's name (SIGUSR2, RTMIN+3), a number nor 'none'; \
                     the default is used"
                ));
            }
        }
        (options, wrong)
    }
}

/// What turns a variable on or off; None for another word.
fn switched(value: &str) -> Option<bool> {
    match value.to_ascii_lowercase().as_str() {
        "1" | "on" | "yes" | "true" => Some(true),
        "0" | "off" | "no" | "false" => Some(false),
        _ => None,
    }
}

/// The variables that a user may set.
const NAMES: [&str; 13] = [
    "STRANDLINE_OUT",
    "STRANDLINE_MODE",
    "STRANDLINE_QUIET",
    "STRANDLINE_EVERY",
    "STRANDLINE_FOCUS",
    "STRANDLINE_GUARD",
    "STRANDLINE_SIGNAL",
    "STRANDLINE_CONTROL",
    "STRANDLINE_CRASH",
    "STRANDLINE_CONF",
    "STRANDLINE_LIB",
    "STRANDLINE_LIBCUDA",
    "STRANDLINE_DEBUG",
];
/// Those that strandline's own command, plugin, tests and build set.
const OWN_NAMES: [&str; 11] = [
    "STRANDLINE_JOB",
    "STRANDLINE_LAUNCHER",
    super::verdict::VARIABLE,
    "STRANDLINE_PYTEST",
    "STRANDLINE_COMMAND",
    "STRANDLINE_VENV",
    "STRANDLINE_STRICT",
    "STRANDLINE_TRACES",
    "STRANDLINE_TEST_PYTHON",
    "STRANDLINE_TEST_SERVICE",
    "STRANDLINE_REQUIRE_TORCH",
];

/// What there is to say of a variable that looks as if it were meant for us.
fn unknown(name: &str) -> Option<String> {
    const OURS: &str = "STRANDLINE_";
    let Some(word) = name.strip_prefix(OURS) else {
        let (word, rest) = name.split_once('_')?;
        let meant = format!("{OURS}{rest}");
        let is_ours = NAMES.contains(&meant.as_str()) && spelling::is_slip(word, OURS.trim_end_matches('_'));
        return is_ours.then(|| {
            format!("{name} is no variable of strandline and has no effect; did you mean {meant}?")
        });
    };
    if NAMES.contains(&name) || OWN_NAMES.contains(&name) {
        return None;
    }
    Some(match spelling::nearest(word, NAMES.iter().filter_map(|name| name.strip_prefix(OURS))) {
        Some(meant) => {
            format!("{name} is no variable of strandline and has no effect; did you mean {OURS}{meant}?")
        }
        None => format!(
            "{name} is no variable of strandline and has no effect; the variables: {}",
            NAMES.join(", ")
        ),
    })
}

/// `STRANDLINE_MODE` as a word that is a mode, or `auto`, or nothing; else what there is to say of it.
pub fn mode_word(text: &str) -> Result<&'static str, String> {
    const WORDS: [&str; 5] = ["auto", "heap", "observer", "host", "off"];
    let text = text.trim();
    if text.is_empty() {
        return Ok("");
    }
    if let Some(word) = WORDS.into_iter().find(|word| text.eq_ignore_ascii_case(word)) {
        return Ok(word);
    }
    let meant =
        spelling::nearest(text, WORDS).map_or(String::new(), |word| format!(" (did you mean {word}?)"));
    Err(format!("there is no mode '{text}'{meant}; the modes: {}", WORDS.join(", ")))
}

/// A signal by name or number; 0 for `none`.
fn signal_number(text: &str) -> Option<i32> {
    let upper = text.to_ascii_uppercase();
    let name = upper.strip_prefix("SIG").unwrap_or(&upper);
    let max = libc::SIGRTMAX();
    match name {
        "NONE" | "OFF" => return Some(0),
        "USR1" => return Some(libc::SIGUSR1),
        "USR2" => return Some(libc::SIGUSR2),
        "HUP" => return Some(libc::SIGHUP),
        "QUIT" => return Some(libc::SIGQUIT),
        "PROF" => return Some(libc::SIGPROF),
        "RTMIN" => return Some(libc::SIGRTMIN()),
        _ => {}
    }
    if let Some(n) = name.strip_prefix("RTMIN+") {
        let number = n.parse::<i32>().ok().and_then(|n| libc::SIGRTMIN().checked_add(n));
        return number.filter(|number| (libc::SIGRTMIN()..=max).contains(number));
    }
    name.parse::<i32>().ok().filter(|n| (0..=max).contains(n))
}

/// The first of the launchers' variables that holds a number.
fn number(names: &[&str]) -> Option<i32> {
    names.iter().find_map(|name| std::env::var(name).ok().and_then(|v| v.trim().parse::<i32>().ok()))
}

/// This process's number among those of the job on this host.
pub fn local_rank() -> u16 {
    let rank = number(&["LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"]);
    rank.and_then(|rank| rank.try_into().ok()).unwrap_or(0)
}

/// This process's place in a distributed job: (rank, world size), from the launchers' variables.
pub fn rank_and_world() -> (i32, i32) {
    let rank = number(&["RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"]).unwrap_or(0);
    let world = number(&["WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"]).unwrap_or(1);
    (rank, world.max(1))
}

/// The command line of this process as the kernel knows it.
pub fn command_line() -> Vec<String> {
    let raw = std::fs::read("/proc/self/cmdline").unwrap_or_default();
    raw.split(|b| *b == 0)
        .filter(|a| !a.is_empty())
        .map(|a| String::from_utf8_lossy(a).into_owned())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pairs: &[(&str, &str)]) -> (Options, Vec<String>) {
        Options::from_lookup(|name| pairs.iter().find(|p| p.0 == name).map(|p| OsString::from(p.1)))
    }

    #[test]
    fn an_empty_environment_gives_the_defaults() {
        let (options, wrong) = read(&[]);
        assert!(wrong.is_empty());
        assert!(!options.quiet && options.every == 0 && options.signal.is_none() && options.out.is_none());
        assert!(options.control && options.crash);
        let (unclear, wrong) = read(&[("STRANDLINE_CRASH", "maybe"), ("STRANDLINE_GUARD", "2")]);
        assert!(unclear.crash && !unclear.guard && wrong.len() == 2, "{wrong:?}");
        assert!(wrong[0].contains("STRANDLINE_CRASH=maybe"), "{wrong:?}");
        assert!(!read(&[("STRANDLINE_CRASH", "off")]).0.crash && !read(&[("STRANDLINE_CRASH", "0")]).0.crash);
    }

    #[test]
    fn wrong_values_are_named_and_ignored() {
        let (options, wrong) = read(&[("STRANDLINE_EVERY", "often"), ("STRANDLINE_SIGNAL", "SIGNOPE")]);
        assert_eq!(options.every, 0);
        assert_eq!(wrong.len(), 2);
        assert!(wrong[0].contains("often") && wrong[1].contains("SIGNOPE"));
    }

    #[test]
    fn a_misspelt_variable_is_named_with_the_one_that_was_meant() {
        for (slip, meant) in [
            ("STRANDLINE_MOED", "STRANDLINE_MODE"),
            ("STRANDLINE_QUITE", "STRANDLINE_QUIET"),
            ("STRANDLINE_OUTT", "STRANDLINE_OUT"),
            ("STRANDLINE_CONFIG", "STRANDLINE_CONF"),
        ] {
            let said = unknown(slip).expect("something to say");
            assert!(said.contains(slip) && said.contains(&format!("did you mean {meant}?")), "{said}");
        }
        let said = unknown("STRANDLNE_MODE").expect("something to say");
        assert!(said.ends_with("did you mean STRANDLINE_MODE?"), "{said}");
        let said = unknown("STRANDLINE_FREQUENCY").expect("something to say");
        assert!(!said.contains("did you mean") && said.contains("STRANDLINE_EVERY"), "{said}");
        for known in NAMES.into_iter().chain(OWN_NAMES).chain(["PATH", "STRANDLINER_X"]) {
            assert_eq!(unknown(known), None);
        }
    }

    #[test]
    fn a_mode_is_a_word_in_any_case_and_others_are_named() {
        assert_eq!(mode_word(""), Ok(""));
        assert_eq!(mode_word(" Heap "), Ok("heap"));
        assert!(mode_word("hoost").is_err_and(|said| said.contains("'hoost' (did you mean host?)")));
        assert!(mode_word("gpu-please").is_err_and(|said| said.contains("auto, heap, observer, host, off")));
    }

    #[test]
    fn signals_have_names_and_numbers() {
        assert_eq!(signal_number("SIGUSR2"), Some(libc::SIGUSR2));
        assert_eq!(signal_number("usr1"), Some(libc::SIGUSR1));
        assert_eq!(signal_number("none"), Some(0));
        assert_eq!(signal_number("RTMIN+7"), Some(libc::SIGRTMIN() + 7));
        assert_eq!(signal_number("RTMIN+700"), None);
        assert_eq!(signal_number("RTMIN+2147483647"), None);
        assert_eq!(signal_number("RTMIN+-40"), None);
        assert_eq!(signal_number("12"), Some(12));
        assert_eq!(signal_number("-1"), None);
    }
}
