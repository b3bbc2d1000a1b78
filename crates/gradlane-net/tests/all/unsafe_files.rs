//! The list of the files that may hold unsafe code, with the reason of each.

use std::fs;
use std::path::Path;

/// Module files and why they hold unsafe code. `#[allow(unsafe_code)]` at a module's declaration admits
/// it; everywhere else the compiler refuses.
const UNSAFE_FILES: &[(&str, &str)] = &[
    ("collectives/memory.rs", "borrows the memory of collectives"),
    ("compute/kernels.rs", "calls kernels that may work in place"),
    ("compute/prepare.rs", "borrows the memory of jobs"),
    ("io/core.rs", "borrows memory for frames"),
    ("io/tests.rs", "registers the memory of tests"),
    ("memory/span.rs", "turns addresses into borrows"),
    ("memory/table.rs", "knows which addresses are registered; allocates buffers"),
    ("sys/syscall.rs", "calls the operating system"),
];

/// Calls `visit` with the path under `root` and the text of each source file.
fn each_file(root: &Path, directory: &Path, visit: &mut dyn FnMut(String, &str)) {
    for entry in fs::read_dir(directory).expect("a folder of sources") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            each_file(root, &path, visit);
        } else {
            let name = path.strip_prefix(root).expect("a path under the root");
            let text = fs::read_to_string(&path).expect("a source file");
            visit(name.display().to_string(), &text);
        }
    }
}

#[test]
fn unsafe_code_is_in_the_listed_files_only() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let (mut found, mut reasons) = (Vec::new(), Vec::new());
    each_file(&root, &root, &mut |name, text| {
        let is_code = |line: &&str| !line.trim_start().starts_with("//");
        let code: Vec<&str> = text.lines().filter(is_code).collect();
        if code.iter().any(|line| line.contains("unsafe {") || line.contains("unsafe impl")) {
            found.push(name);
        }
        let allowed = code.iter().filter_map(|line| {
            line.strip_prefix("#[allow(unsafe_code, reason = \"")?.strip_suffix("\")]")
        });
        reasons.extend(allowed.map(str::to_owned));
    });
    found.sort();
    reasons.sort();
    let listed: Vec<&str> = UNSAFE_FILES.iter().map(|(file, _)| *file).collect();
    let mut listed_reasons: Vec<&str> = UNSAFE_FILES.iter().map(|(_, reason)| *reason).collect();
    listed_reasons.sort_unstable();
    assert_eq!(found, listed);
    assert_eq!(reasons, listed_reasons);
}
