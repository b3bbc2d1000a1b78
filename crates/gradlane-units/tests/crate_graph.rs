//! Keeps the arrows between the layers, and the pure crates pure: no std, no unsafe code, no clock, no
//! socket, no dependence that could bring one in.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Which crates of the project each crate may use.
const ARROWS: &[(&str, &[&str])] = &[
    ("gradlane-units", &[]),
    ("gradlane-wire", &["gradlane-units"]),
    ("gradlane-codec", &["gradlane-units"]),
    ("gradlane-engine", &["gradlane-units", "gradlane-wire"]),
    ("gradlane-seal", &["gradlane-units", "gradlane-wire"]),
    (
        "gradlane-net",
        &["gradlane-units", "gradlane-wire", "gradlane-codec", "gradlane-engine", "gradlane-seal"],
    ),
    ("gradlane-sim", &["gradlane-units", "gradlane-wire", "gradlane-codec", "gradlane-engine"]),
    (
        "gradlane-fuzz",
        &[
            "gradlane-units",
            "gradlane-wire",
            "gradlane-codec",
            "gradlane-engine",
            "gradlane-seal",
            "gradlane-net",
        ],
    ),
    (
        "gradlane-py",
        &["gradlane-units", "gradlane-codec", "gradlane-engine", "gradlane-net", "gradlane-sim"],
    ),
];
/// Crates without std and without a host.
const PURE: &[&str] = &["gradlane-units", "gradlane-wire", "gradlane-engine"];
/// Crates from outside that the pure crates may use; each works without std.
const PURE_EXTERNAL: &[&str] = &["crc32fast", "serde", "thiserror"];
/// Crates that may hold unsafe code.
const UNSAFE: &[&str] = &["gradlane-net", "gradlane-codec", "gradlane-py"];

fn crates() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Names under `[dependencies]` of a crate's manifest.
fn dependencies(name: &str) -> Vec<String> {
    let manifest = fs::read_to_string(crates().join(name).join("Cargo.toml")).expect("a manifest");
    let section = manifest.lines().skip_while(|line| line.trim() != "[dependencies]").skip(1);
    let lines = section.take_while(|line| !line.starts_with('['));
    let names = lines.filter_map(|line| line.split_once(['=', '.']).map(|(name, _)| name.trim()));
    names.filter(|name| !name.is_empty() && !name.starts_with('#')).map(String::from).collect()
}

fn sources(folder: &Path, found: &mut BTreeMap<PathBuf, String>) {
    for entry in fs::read_dir(folder).expect("a folder").flatten() {
        let path = entry.path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|it| it == "rs") {
            let text = fs::read_to_string(&path).expect("a source file");
            found.insert(path, text);
        }
    }
}

#[test]
fn imports_go_downwards_only() {
    for entry in fs::read_dir(crates()).expect("the crates").flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let allowed = ARROWS.iter().find(|(crate_name, _)| *crate_name == name);
        let (_, allowed) = allowed.unwrap_or_else(|| panic!("{name} has no place in the layers"));
        for dependency in dependencies(&name).iter().filter(|it| it.starts_with("gradlane-")) {
            assert!(allowed.contains(&dependency.as_str()), "{name} must not use {dependency}");
        }
    }
}

#[test]
fn pure_crates_have_no_std_no_clock_and_no_socket() {
    for name in PURE {
        for dependency in dependencies(name) {
            let known =
                dependency.starts_with("gradlane-") || PURE_EXTERNAL.contains(&dependency.as_str());
            assert!(known, "{name} uses {dependency}, which is not known to work without std");
        }
        let mut files = BTreeMap::new();
        sources(&crates().join(name).join("src"), &mut files);
        let root = files.iter().find(|(path, _)| path.ends_with("src/lib.rs")).expect("a root").1;
        for line in ["#![no_std]", "#![forbid(unsafe_code)]"] {
            assert!(root.contains(line), "{name} lacks {line}");
        }
        for (path, text) in &files {
            let product = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
            if path.to_string_lossy().contains("_tests") {
                continue;
            }
            for banned in ["std::net", "std::time", "std::thread", "Instant", "HashMap"] {
                assert!(!product.contains(banned), "{} names {banned}", path.display());
            }
        }
    }
}

#[test]
fn unsafe_code_stays_where_it_may_be_with_its_reason() {
    for (name, _) in ARROWS {
        let folder = crates().join(name).join("src");
        let mut files = BTreeMap::new();
        if folder.exists() {
            sources(&folder, &mut files);
        }
        for (path, text) in files {
            let has_unsafe = text.lines().any(|line| {
                let code = line.trim_start();
                !code.starts_with("//") && code.contains("unsafe {")
            });
            if has_unsafe {
                assert!(UNSAFE.contains(name), "{} has unsafe code", path.display());
                assert!(text.contains("SAFETY:"), "{} gives no reason", path.display());
            }
        }
    }
}

/// Modules of the engine, and the modules of it that each may import.
const WALLS: &[(&str, &[&str])] = &[
    ("plan", &["api", "plan", "rank_set"]),
    ("transmit", &["api", "plan", "rank_set", "transmit"]),
    ("worker", &["api", "plan", "violation", "worker"]),
];
/// The engine's schemes: none imports another one.
const SCHEMES: &[&str] = &["ps", "ring", "gather"];

#[test]
fn the_engine_keeps_its_walls() {
    let mut files = BTreeMap::new();
    let folder = crates().join("gradlane-engine/src");
    sources(&folder, &mut files);
    for (path, text) in files {
        let name = path.strip_prefix(&folder).expect("a source").with_extension("");
        let name = name.to_string_lossy().into_owned();
        let module = name.split('/').next().unwrap_or_default().to_owned();
        let product = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
        if name.ends_with("_tests") {
            continue;
        }
        // With the files of its own folder.
        let is_engine = module == "engine";
        assert!(is_engine || !product.contains("impl Engine {"), "{name} implements Engine");
        let matches = product.contains("match scheme {");
        assert!(!matches || ["lane", "plan"].contains(&module.as_str()), "{name}: match scheme");
        for line in product.lines().filter_map(|line| line.trim().strip_prefix("use crate::")) {
            let imported = line.split([':', ';']).next().unwrap_or_default();
            if let Some((_, allowed)) = WALLS.iter().find(|(wall, _)| *wall == module) {
                assert!(allowed.contains(&imported), "{name} imports {imported}");
            }
            let foreign = SCHEMES.contains(&module.as_str())
                && SCHEMES.contains(&imported)
                && imported != module;
            assert!(!foreign, "{name} imports {imported}");
        }
    }
}

/// A file that `main.rs` does not name would never run, and each further binary costs seconds of linking.
#[test]
fn a_crate_has_one_binary_of_integration_tests() {
    for (name, _) in ARROWS {
        let folder = crates().join(name).join("tests");
        let Ok(main) = fs::read_to_string(folder.join("all/main.rs")) else {
            continue;
        };
        let mut files = BTreeMap::new();
        sources(&folder, &mut files);
        for (path, text) in files {
            let file = path.strip_prefix(&folder).expect("a test").with_extension("");
            let file = file.to_string_lossy();
            let Some(module) = file.strip_prefix("all/") else {
                let has_reason = text.contains("//! A binary of its own: ");
                assert!(has_reason, "{name}: {file} is a binary of its own for no reason");
                continue;
            };
            if !module.contains('/') && module != "main" {
                let is_named = main.lines().any(|line| line == format!("mod {module};"));
                assert!(is_named, "{name}: tests/all/main.rs lacks `mod {module};`");
            }
        }
    }
}
