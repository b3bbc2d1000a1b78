//! Keeps modules of a crate out of circles: no module uses another one that, directly or not, uses it. An edge goes
//! from a file to the file that defines the name, whatever module passes the name on; tests are left out.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// Modules in circles that a crate still has, at most; the others have none.
const IN_CIRCLES: &[(&str, usize)] = &[("gradlane-codec", 21)];

/// The path of a module or of a name: `["ps", "owner"]`.
type Names = Vec<String>;

/// The source of one module.
#[derive(Default)]
struct Source {
    /// Whether the module has a child of this name.
    children: BTreeSet<String>,
    /// By name in this module: the path that it was brought in from, and whether only to be passed on.
    imports: BTreeMap<String, (Names, bool)>,
    /// Modules all of whose names this one has.
    globs: Vec<Names>,
    /// Paths in the code itself.
    paths: Vec<Names>,
    words: BTreeSet<String>,
}

/// A crate's modules by path.
type Modules = BTreeMap<Names, Source>;

fn is_name(it: char) -> bool {
    it.is_alphanumeric() || it == '_'
}

/// Reads the tree of a `use`: each name, the path behind it, and globs as `*`.
fn read_tree(tree: &str, before: &Names, found: &mut Vec<(String, Names)>) {
    let tree = tree.trim();
    if let Some((head, list)) = tree.split_once('{') {
        let mut before = before.clone();
        before
            .extend(head.split("::").map(str::trim).filter(|it| !it.is_empty()).map(String::from));
        let list = &list[..list.rfind('}').expect("a brace that closes")];
        let (mut depth, mut start) = (0, 0);
        for (at, character) in list.char_indices().chain([(list.len(), ',')]) {
            match character {
                '{' => depth += 1,
                '}' => depth -= 1,
                ',' if depth == 0 => {
                    read_tree(&list[start..at], &before, found);
                    start = at + 1;
                }
                _ => {}
            }
        }
    } else if !tree.is_empty() {
        let (path, alias) = tree.split_once(" as ").unwrap_or((tree, ""));
        let mut names = before.clone();
        names.extend(path.split("::").map(|it| it.trim().to_string()));
        names.retain(|it| it != "self");
        let last = names.last().cloned().unwrap_or_default();
        found.push((if alias.is_empty() { last } else { alias.trim().to_string() }, names));
    }
}

/// Makes a path of this module absolute; none where it leads out of the crate.
fn absolute(module: &Names, path: &Names, source: &Source) -> Option<Names> {
    let first = path.first()?.as_str();
    let climbs = path.iter().take_while(|it| *it == "super").count();
    if first == "crate" {
        Some(path[1..].to_vec())
    } else if climbs > 0 {
        let base = &module[..module.len().checked_sub(climbs)?];
        Some(base.iter().chain(&path[climbs..]).cloned().collect())
    } else if source.children.contains(first) {
        Some(module.iter().chain(path).cloned().collect())
    } else {
        None
    }
}

fn read_source(text: &str) -> Source {
    let text = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
    let code: Vec<&str> =
        text.lines().map(|it| it.split("//").next().unwrap_or_default()).collect();
    let mut source = Source::default();
    let mut body = String::new();
    let mut rest = code.join("\n");
    while let Some((at, public)) = next_use(&rest) {
        body.push_str(&rest[..at]);
        let end = at + rest[at..].find(';').expect("a use that ends");
        let tree = rest[at..end].split_once("use ").map_or("", |(_, tree)| tree).to_string();
        let mut found = Vec::new();
        read_tree(&tree, &Names::new(), &mut found);
        for (name, path) in found {
            if name == "*" {
                source.globs.push(path[..path.len() - 1].to_vec());
            } else {
                source.imports.insert(name, (path, public));
            }
        }
        rest = rest[end + 1..].to_string();
    }
    body.push_str(&rest);
    for line in body.lines().filter(|it| it.ends_with(';')) {
        if let Some((_, name)) = line.split_once("mod ").filter(|(head, _)| !head.contains('"')) {
            source.children.insert(name.trim_end_matches(';').to_string());
        }
    }
    let pieces = body.split(|it: char| !is_name(it) && it != ':');
    for piece in pieces.filter(|it| !it.is_empty()) {
        let path: Names = piece.split("::").map(String::from).collect();
        source.words.extend(path.first().cloned());
        if path.len() > 1 {
            source.paths.push(path);
        }
    }
    source
}

/// Where the next `use` at the beginning of a line begins, and whether it passes names on.
fn next_use(text: &str) -> Option<(usize, bool)> {
    let starts = ["use ", "pub use ", "pub(crate) use ", "pub(super) use "];
    let found = starts.iter().filter_map(|start| {
        let at = if text.starts_with(start) {
            Some(0)
        } else {
            text.find(&format!("\n{start}")).map(|at| at + 1)
        };
        at.map(|at| (at, start.starts_with("pub")))
    });
    found.min()
}

fn read_modules(folder: &Path, module: &Names, modules: &mut Modules) {
    for entry in fs::read_dir(folder).expect("a folder").flatten() {
        let path = entry.path();
        let stem = path.file_stem().expect("a name").to_string_lossy().into_owned();
        if stem == "tests" || stem.ends_with("_tests") || stem == "test_support" {
            continue;
        }
        let mut name = module.clone();
        if stem != "lib" && stem != "main" {
            name.push(stem);
        }
        if path.is_dir() {
            read_modules(&path, &name, modules);
        } else if path.extension().is_some_and(|it| it == "rs") {
            let text = fs::read_to_string(&path).expect("a source file");
            modules.insert(name, read_source(&text));
        }
    }
}

/// The module that defines the name at this path; none where the path is a module itself, or leads out of the crate.
fn definer(modules: &Modules, path: &[String], depth: usize) -> Option<Names> {
    let inner = (0..=path.len()).rev().find(|&it| modules.contains_key(&path[..it]))?;
    let module = path[..inner].to_vec();
    let (name, source) = (path.get(inner)?, &modules[&module]);
    if depth > 8 {
        return None;
    }
    if let Some((from, _)) = source.imports.get(name) {
        let mut from = absolute(&module, from, source)?;
        from.extend(path[inner + 1..].iter().cloned());
        return definer(modules, &from, depth + 1);
    }
    if source.words.contains(name) {
        return Some(module);
    }
    let through = |glob: &Names| {
        let mut from = absolute(&module, glob, source)?;
        from.extend(path[inner..].iter().cloned());
        definer(modules, &from, depth + 1)
    };
    source.globs.iter().find_map(through)
}

/// The modules that each module uses.
fn edges(modules: &Modules) -> BTreeMap<Names, BTreeSet<Names>> {
    let uses = |module: &Names, source: &Source| {
        let mut paths: Vec<Names> = Vec::new();
        for (name, (path, passed_on)) in &source.imports {
            if !passed_on || source.words.contains(name) {
                paths.extend(absolute(module, path, source));
            }
        }
        for path in &source.paths {
            // `jobs::Task`, where `jobs` was brought in.
            if let Some((from, _)) = source.imports.get(&path[0]) {
                let from = absolute(module, from, source).filter(|it| modules.contains_key(it));
                paths.extend(from.map(|it| it.iter().chain(&path[1..]).cloned().collect()));
            } else {
                paths.extend(absolute(module, path, source));
            }
        }
        let found = paths.iter().filter_map(|path| definer(modules, path, 0));
        found.filter(|it| it != module).collect()
    };
    modules.iter().map(|(module, source)| (module.clone(), uses(module, source))).collect()
}

/// Modules that use themselves by way of others.
fn in_circles(edges: &BTreeMap<Names, BTreeSet<Names>>) -> Vec<String> {
    let comes_back = |start: &&Names| {
        let (mut seen, mut ahead) = (BTreeSet::new(), vec![*start]);
        while let Some(module) = ahead.pop() {
            for next in edges.get(module).into_iter().flatten() {
                if next == *start {
                    return true;
                }
                if seen.insert(next) {
                    ahead.push(next);
                }
            }
        }
        false
    };
    edges.keys().filter(comes_back).map(|it| it.join("::")).collect()
}

#[test]
fn no_module_uses_itself_by_way_of_others() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut wrong = Vec::new();
    for entry in fs::read_dir(crates).expect("the crates").flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let mut modules = Modules::new();
        read_modules(&entry.path().join("src"), &Names::new(), &mut modules);
        let found = in_circles(&edges(&modules));
        let allowed = IN_CIRCLES.iter().find(|(of, _)| *of == name).map_or(0, |(_, most)| *most);
        if found.len() > allowed {
            wrong.push(format!("{name}: {}, at most {allowed}: {found:?}", found.len()));
        }
    }
    assert!(wrong.is_empty(), "modules in circles:\n{}", wrong.join("\n"));
}
