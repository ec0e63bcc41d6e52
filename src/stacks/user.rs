//! Which files are the user's own, so that a report can say "you wrote this line".
//!
//! Must not know anything but file names. The rule, in order: below a user root it is the user's; below
//! a library root (the standard library, as the Python side knows it, and strandline's own files) it is
//! not; names in angle brackets are the user's when they stand for something typed in; generated code
//! is not; `site-packages`, `dist-packages` and `lib/python3.X` are not; all else is.
#![deny(unsafe_code)]

/// The roots that decide before the file's own name does.
#[derive(Clone, Debug, Default)]
pub struct Rule {
    user_roots: Vec<String>,
    library_roots: Vec<String>,
}

/// Typed in by the user: the shell, `python -c`, notebooks, doctests.
const TYPED: [&str; 6] = ["<stdin>", "<string>", "<console>", "<ipython-input", "<python-input", "<doctest"];
/// Written by torch's compiler, wherever it puts that.
const GENERATED: [&str; 4] =
    ["/torch/_dynamo/", "/torch/_inductor/", "/torchinductor_", "/torch_compile_debug/"];

impl Rule {
    pub const fn new() -> Rule {
        Rule { user_roots: Vec::new(), library_roots: Vec::new() }
    }

    pub fn set_user_roots(&mut self, roots: Vec<String>) {
        self.user_roots = roots;
    }

    pub fn set_library_roots(&mut self, roots: Vec<String>) {
        self.library_roots = roots;
    }

    pub fn is_user(&self, file: &str) -> bool {
        let below = |roots: &[String]| roots.iter().any(|root| is_below(file, root));
        if file.is_empty() {
            return false;
        }
        if below(&self.user_roots) {
            return true;
        }
        if below(&self.library_roots) {
            return false;
        }
        if file.starts_with('<') {
            return TYPED.iter().any(|typed| file.starts_with(typed));
        }
        !GENERATED.iter().any(|part| file.contains(part)) && !is_installed(file)
    }
}

/// Files whose functions are nobody's own: the loader, the C and C++ runtimes, CUDA's libraries, this one.
const RUNTIMES: [&str; 11] = [
    "ld-linux",
    "libc.so",
    "libc-",
    "libm.so",
    "libpthread",
    "libdl",
    "libstdc++",
    "libgcc_s",
    "libcu",
    "libnv",
    "libstrandline",
];
const SYSTEM: [&str; 6] = ["/lib/", "/lib64/", "/usr/lib/", "/usr/lib64/", "/usr/local/cuda", "/opt/cuda"];
/// Functions that a program has from elsewhere: headers of templates, a cudart that is linked into it.
const ELSEWHERE: [&str; 11] = [
    "std::",
    "__gnu_cxx::",
    "thrust::",
    "cub::",
    "cuda::",
    "cudart::",
    "__cuda",
    "libcudart_static_",
    "_start",
    "__libc_start",
    "strandline_",
];

/// Whether a native frame is the user's: in a program without Python.
pub fn is_user_native(file: &str, function: &str) -> bool {
    let base = file.rsplit('/').next().unwrap_or(file);
    let of_cuda = |prefix: &str| {
        function.strip_prefix(prefix).is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_uppercase()))
    };
    !base.is_empty()
        && !RUNTIMES.iter().any(|runtime| base.starts_with(runtime))
        && !SYSTEM.iter().any(|folder| file.starts_with(folder))
        && !ELSEWHERE.iter().any(|name| function.starts_with(name))
        && !of_cuda("cuda")
        && !of_cuda("cu")
}

fn is_below(file: &str, root: &str) -> bool {
    let root = root.trim_end_matches('/');
    !root.is_empty() && file.strip_prefix(root).is_some_and(|rest| rest.starts_with('/'))
}

/// Below `site-packages`, `dist-packages`, `lib/python3.X` (also `lib64`) or in `python3X.zip`.
fn is_installed(file: &str) -> bool {
    let mut parts = file.split('/').rev().skip(1).collect::<Vec<_>>();
    parts.reverse();
    parts.iter().any(|part| matches!(*part, "site-packages" | "dist-packages") || is_zip(part))
        || parts.windows(2).any(|pair| matches!(pair[0], "lib" | "lib64") && is_python(pair[1]))
}

fn is_python(part: &str) -> bool {
    part.strip_prefix("python3").is_some_and(|rest| {
        rest.is_empty()
            || rest.strip_prefix('.').is_some_and(|minor| minor.trim_end_matches('t').parse::<u32>().is_ok())
    })
}

fn is_zip(part: &str) -> bool {
    part.strip_prefix("python3")
        .and_then(|rest| rest.strip_suffix(".zip"))
        .is_some_and(|minor| minor.parse::<u32>().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rule_for_native_frames() {
        for (file, function, user) in [
            ("./train", "keep_result", true),
            ("/home/me/build/libmine.so", "mine::Cache::put", true),
            ("/home/me/train", "cudaMalloc", false),
            ("/home/me/train", "cuMemAlloc_v2", false),
            ("/home/me/train", "libcudart_static_0053c1d3", false),
            ("/home/me/train", "customer", true),
            ("/home/me/train", "cudamemory", true),
            ("/home/me/train", "std::vector<int>::push_back", false),
            ("/home/me/train", "_start", false),
            ("/lib/x86_64-linux-gnu/libc.so.6", "__libc_start_main", false),
            ("/opt/venv/nvidia/cu13/lib/libcudart.so.13", "x", false),
            ("libcublas.so.13", "cublasCreate_v2", false),
            ("", "0x1234", false),
        ] {
            assert_eq!(is_user_native(file, function), user, "{file} {function}");
        }
    }

    #[test]
    fn the_rule() {
        let mut rule = Rule::new();
        rule.set_library_roots(vec!["/opt/py/stdlib/".into(), "/src/strandline/python".into()]);
        rule.set_user_roots(vec!["/venv/lib/python3.12/site-packages/mine".into()]);
        for (file, user) in [
            ("train.py", true),
            ("/home/me/train.py", true),
            ("/home/me/lib/python3.11-experiments/a.py", true),
            ("/home/me/lib/models/python3.py", true),
            ("/tmp/ipykernel_4711/123.py", true),
            ("<stdin>", true),
            ("<string>", true),
            ("<ipython-input-3-abc>", true),
            ("<python-input-0>", true),
            ("<frozen importlib._bootstrap>", false),
            ("<strandline boot>", false),
            ("<eval_with_key>.5", false),
            ("<attrs generated init a.B>", false),
            ("", false),
            ("/usr/lib/python3.11/threading.py", false),
            ("/usr/lib64/python3.9/json/decoder.py", false),
            ("/usr/lib/python3/dist-packages/numpy/a.py", false),
            ("/usr/lib/python3.13t/queue.py", false),
            ("/usr/lib/python311.zip/queue.py", false),
            ("/home/me/.venv/lib/python3.12/site-packages/torch/nn/modules/module.py", false),
            ("/venv/lib/python3.12/site-packages/mine/net.py", true),
            ("/venv/lib/python3.12/site-packages/mine2/net.py", false),
            ("/opt/py/stdlib/queue.py", false),
            ("/opt/py/stdlib2/queue.py", true),
            ("/src/strandline/python/strandline/hooks.py", false),
            ("/src/pytorch/torch/_dynamo/eval_frame.py", false),
            ("/tmp/torchinductor_me/ab/cab.py", false),
        ] {
            assert_eq!(rule.is_user(file), user, "{file}");
        }
    }
}
