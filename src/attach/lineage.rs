//! Which process this is, and which ones started it: by number and by when it began, since numbers are used again and
//! are the same on different hosts. Must not know what is done with that.

/// Ancestors that are looked for, at most.
const GENERATIONS: usize = 64;

/// The name of a process and the number of its parent. Nothing if there is no such process, or no `/proc`.
fn look(pid: u32) -> Option<(String, u32)> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (parent, began) = parse(&stat)?;
    Some((format!("{pid}:{began}"), parent))
}

/// The parent and the start time (fields 4 and 22) of a line of `/proc/PID/stat`. The command's name, in brackets,
/// may hold anything.
fn parse(stat: &str) -> Option<(u32, u64)> {
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let parent = fields.nth(1)?.parse().ok()?;
    Some((parent, fields.nth(17)?.parse().ok()?))
}

/// What this process goes by.
pub fn own() -> String {
    let pid = std::process::id();
    look(pid).map_or_else(|| format!("{pid}:"), |(name, _)| name)
}

/// What the processes go by that started this one, the nearest first.
pub fn ancestors() -> Vec<String> {
    let mut names = Vec::new();
    let mut pid = std::os::unix::process::parent_id();
    while names.len() < GENERATIONS && pid != 0 {
        let Some((name, parent)) = look(pid) else { break };
        names.push(name);
        pid = parent;
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_proc_is_understood_whatever_the_command_is_called() {
        let line = "4711 (a) b (c) S 17 4711 4711 34816 4711 4194304 1 2 3 4 5 6 7 8 20 0 1 0 998877 1 2 3";
        assert_eq!(parse(line), Some((17, 998_877)));
        assert_eq!(parse("4711 (cut) S 17 4711"), None);
        assert_eq!(parse(""), None);
    }

    #[test]
    fn the_parent_is_among_the_ancestors_and_this_process_is_not() {
        let parent = look(std::os::unix::process::parent_id()).map(|(name, _)| name);
        assert_eq!(ancestors().first().cloned(), parent);
        assert!(own().starts_with(&format!("{}:", std::process::id())) && !ancestors().contains(&own()));
    }
}
