//! Reads the modules of every crate of the repository: for each file, which items of which other files it names.

use std::collections::{BTreeMap, BTreeSet};

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{
    Attribute, Expr, ExprLit, Item, ItemMod, ItemUse, Lit, Meta, MetaNameValue, Path, UseTree, Visibility,
};

use crate::files::SourceFile;

/// A file names something that another file defines. A module and the modules below it may name each other's items, so these
/// names are not listed.
#[derive(Debug)]
pub(crate) struct Named<'a> {
    pub(crate) from: &'a str,
    pub(crate) line: usize,
    pub(crate) name: String,
    /// The file that defines the item, not one that only re-exports it.
    pub(crate) to: &'a str,
    /// Only tests, fuzz targets or the documentation need it.
    pub(crate) for_tests: bool,
}

/// Folders and files with these names, and code with one of these words in its `cfg`, are only for tests, fuzz targets or documentation.
const FOR_TESTS: [&str; 5] = ["test", "tests", "testing", "fuzzing", "doc"];

/// A module: a whole file, or an inline `mod a { }`.
struct Module<'a> {
    file: &'a str,
    parent: Option<usize>,
    children: BTreeMap<String, Vec<usize>>,
    items: BTreeSet<String>,
    /// The names that `use` brings into the module, each with the path it stands for: several paths where a `cfg` decides.
    imports: BTreeMap<String, Vec<Vec<String>>>,
    globs: Vec<Vec<String>>,
    /// Every import, and every path of several names, in the module's code, with its line and whether it is only for tests.
    paths: Vec<(Vec<String>, usize, bool)>,
}

/// What a path leads to: a module, or something that is defined in a module.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Meaning {
    Module(usize),
    Item(usize),
}

/// Where the first name of a path stands.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Start {
    /// In code: it may also be the name of another crate or of a built-in type.
    Code,
    /// In an import: as in code, but it is not looked for among the names that other imports bring in by `*`.
    Import,
    /// After `crate`, `self`, `super` or the name of a module. A name that is not declared there counts as an item of that module: a
    /// macro may define it.
    Within,
}

/// Reads every crate whose manifest is among the files.
pub(crate) fn named<'a>(files: &'a [SourceFile], syntax: &'a BTreeMap<&str, syn::File>) -> Vec<Named<'a>> {
    let mut reader = Reader { files: syntax, modules: Vec::new(), at: 0, for_tests: false };
    for root in roots(files) {
        reader.file(&root, None);
    }
    reader.named()
}

/// The root files of crates that may exist: `src/lib.rs`, `src/main.rs`, and each `path` in a manifest.
fn roots(files: &[SourceFile]) -> BTreeSet<String> {
    let mut roots = BTreeSet::new();
    for file in files {
        let Some(folder) = file.path.strip_suffix("Cargo.toml") else { continue };
        let told = file.text.lines().filter_map(|line| line.strip_prefix("path = \"")?.strip_suffix('"'));
        roots.extend(told.chain(["src/lib.rs", "src/main.rs"]).map(|path| format!("{folder}{path}")));
    }
    roots
}

/// Follows the modules of a crate from its root.
struct Reader<'a> {
    files: &'a BTreeMap<&'a str, syn::File>,
    modules: Vec<Module<'a>>,
    /// The module that is read now.
    at: usize,
    for_tests: bool,
}

impl<'a> Reader<'a> {
    fn file(&mut self, path: &str, parent: Option<usize>) -> Option<usize> {
        let (path, syntax) = self.files.get_key_value(path)?;
        let before = self.for_tests;
        self.for_tests |= path.trim_end_matches(".rs").split('/').any(|part| FOR_TESTS.contains(&part));
        let module = self.module(path, parent, &syntax.items);
        self.for_tests = before;
        Some(module)
    }

    fn module(&mut self, file: &'a str, parent: Option<usize>, content: &'a [Item]) -> usize {
        let module = self.modules.len();
        self.modules.push(Module {
            file,
            parent,
            children: BTreeMap::new(),
            items: BTreeSet::new(),
            imports: BTreeMap::new(),
            globs: Vec::new(),
            paths: Vec::new(),
        });
        let before = std::mem::replace(&mut self.at, module);
        content.iter().for_each(|item| self.visit_item(item));
        self.at = before;
        module
    }

    /// The paths at which the file of a module declared here may be. A module has two files where a `cfg_attr` gives one of them a path.
    fn places(&self, declared: &ItemMod) -> Vec<String> {
        let Module { file, parent, .. } = &self.modules[self.at];
        let folder = file.rsplit_once('/').map_or("", |(folder, _)| folder);
        let is_folder = parent.is_none() || file.ends_with("/mod.rs");
        let within = if is_folder { folder } else { file.trim_end_matches(".rs") };
        let usual = ["", "/mod"].map(|end| format!("{within}/{}{end}.rs", declared.ident));
        let given = declared.attrs.iter().filter_map(path_of);
        usual.into_iter().chain(given.map(|path| format!("{folder}/{path}"))).collect()
    }

    fn import(&mut self, tree: &UseTree, path: &mut Vec<String>) {
        let (last, alias) = match tree {
            UseTree::Path(tree) => {
                path.push(tree.ident.to_string());
                self.import(&tree.tree, path);
                path.pop();
                return;
            }
            UseTree::Group(group) => return group.items.iter().for_each(|tree| self.import(tree, path)),
            UseTree::Glob(glob) => {
                self.modules[self.at].globs.push(path.clone());
                let whole = [path.as_slice(), &["*".into()]].concat();
                return self.path(whole, glob.star_token.spans[0].start().line);
            }
            UseTree::Name(name) => (&name.ident, &name.ident),
            UseTree::Rename(tree) => (&tree.ident, &tree.rename),
        };
        let mut whole = path.clone();
        if last != "self" {
            whole.push(last.to_string());
        }
        let alias =
            if alias == "self" { path.last().cloned().unwrap_or_default() } else { alias.to_string() };
        self.modules[self.at].imports.entry(alias).or_default().push(whole.clone());
        self.path(whole, last.span().start().line);
    }

    fn path(&mut self, path: Vec<String>, line: usize) {
        let for_tests = self.for_tests;
        self.modules[self.at].paths.push((path, line, for_tests));
    }

    /// What a path in the module `at` leads to: nothing if it leads to another crate.
    fn meanings(&self, at: usize, path: &[String], start: Start, depth: usize) -> BTreeSet<Meaning> {
        let Some((first, rest)) = path.split_first() else { return BTreeSet::from([Meaning::Module(at)]) };
        // No path needs so many steps, unless imports refer to each other in a loop.
        if depth == 0 {
            return BTreeSet::new();
        }
        let module = &self.modules[at];
        let follow = |next: usize| self.meanings(next, rest, Start::Within, depth - 1);
        match first.as_str() {
            "crate" => return follow(self.above(at).last().unwrap_or(at)),
            "self" => return follow(at),
            "super" => return module.parent.map(follow).unwrap_or_default(),
            "*" => return BTreeSet::from([Meaning::Item(at)]),
            _ => {}
        }
        let mut found = BTreeSet::new();
        for import in module.imports.get(first).into_iter().flatten() {
            for meaning in self.meanings(at, import, Start::Import, depth - 1) {
                match meaning {
                    Meaning::Module(module) => found.extend(follow(module)),
                    item => found.extend([item]),
                }
            }
        }
        if module.items.contains(first) {
            found.extend([Meaning::Item(at)]);
        }
        found.extend(module.children.get(first).into_iter().flatten().flat_map(|child| follow(*child)));
        if found.is_empty() && start != Start::Import {
            for glob in &module.globs {
                for meaning in self.meanings(at, glob, Start::Import, depth - 1) {
                    if let Meaning::Module(there) = meaning {
                        found.extend(self.meanings(there, path, Start::Code, depth - 1));
                    }
                }
            }
        }
        if found.is_empty() && start == Start::Within {
            found.extend([Meaning::Item(at)]);
        }
        found
    }

    /// The ancestors of a module, the crate's root last.
    fn above(&self, module: usize) -> impl Iterator<Item = usize> + '_ {
        std::iter::successors(self.modules[module].parent, |above| self.modules[*above].parent)
    }

    fn named(&self) -> Vec<Named<'a>> {
        let mut named = Vec::new();
        for (here, module) in self.modules.iter().enumerate() {
            for (path, line, for_tests) in &module.paths {
                for meaning in self.meanings(here, path, Start::Code, 12) {
                    // Naming a module alone does not count: the items that are named through it do.
                    let Meaning::Item(there) = meaning else { continue };
                    let (from, to) = (module.file, self.modules[there].file);
                    let is_above =
                        |above: &str, module| self.above(module).any(|at| self.modules[at].file == above);
                    if from != to && !is_above(to, here) && !is_above(from, there) {
                        let name = path.join("::");
                        named.push(Named { from, line: *line, name, to, for_tests: *for_tests });
                    }
                }
            }
        }
        named
    }
}

/// The path in `#[path = "a.rs"]`, also inside a `cfg_attr`.
fn path_of(attribute: &Attribute) -> Option<String> {
    match &attribute.meta {
        Meta::NameValue(MetaNameValue {
            path,
            value: Expr::Lit(ExprLit { lit: Lit::Str(text), .. }),
            ..
        }) => path.is_ident("path").then(|| text.value()),
        Meta::List(list) if list.path.is_ident("cfg_attr") => {
            let text = list.tokens.to_string();
            Some(text.split_once("path = \"")?.1.split_once('"')?.0.to_string())
        }
        _ => None,
    }
}

/// Appends the paths in these tokens: names with `::` between them. Also appends paths of one name and empty ones, which the caller filters out.
fn paths_in(tokens: TokenStream, paths: &mut Vec<(Vec<String>, usize)>) {
    let mut colons = 0;
    for token in tokens {
        match token {
            TokenTree::Punct(sign) if sign.as_char() == ':' => {
                colons += 1;
                continue;
            }
            TokenTree::Ident(name) => match paths.last_mut() {
                Some((path, _)) if colons == 2 => path.push(name.to_string()),
                _ => paths.push((vec![name.to_string()], name.span().start().line)),
            },
            TokenTree::Group(group) => {
                paths.push(Default::default());
                paths_in(group.stream(), paths);
                paths.push(Default::default());
            }
            // Any other token ends the path: the empty one keeps the next name from continuing it.
            _ => paths.push(Default::default()),
        }
        colons = 0;
    }
}

/// Whether it is an attribute like `cfg(any(test, feature = "testing"))`.
pub(crate) fn is_for_tests(attribute: &Attribute) -> bool {
    let Ok(list) = attribute.meta.require_list() else { return false };
    let text = list.tokens.to_string();
    let has = |wanted: &[&str]| text.split(|c: char| !c.is_alphanumeric()).any(|word| wanted.contains(&word));
    list.path.is_ident("cfg") && has(&FOR_TESTS) && !has(&["not"])
}

/// Visits nodes that can have a `cfg`. The visitor sees a node's attributes first, and these set `for_tests`; after the node it is reset.
macro_rules! with_attributes {
    ($($visit:ident: $node:ident),*) => {$(
        fn $visit(&mut self, node: &'a syn::$node) {
            let before = self.for_tests;
            visit::$visit(self, node);
            self.for_tests = before;
        }
    )*};
}

impl<'a> Visit<'a> for Reader<'a> {
    with_attributes! {
        visit_impl_item: ImplItem, visit_trait_item: TraitItem, visit_stmt: Stmt, visit_field: Field,
        visit_field_value: FieldValue, visit_arm: Arm, visit_variant: Variant
    }

    fn visit_item(&mut self, item: &'a Item) {
        let name = match item {
            Item::Const(item) => Some(&item.ident),
            Item::Enum(item) => Some(&item.ident),
            Item::Fn(item) => Some(&item.sig.ident),
            Item::Macro(item) => item.ident.as_ref(),
            Item::Static(item) => Some(&item.ident),
            Item::Struct(item) => Some(&item.ident),
            Item::Trait(item) => Some(&item.ident),
            Item::Type(item) => Some(&item.ident),
            Item::Union(item) => Some(&item.ident),
            _ => None,
        };
        self.modules[self.at].items.extend(name.map(ToString::to_string));
        let before = self.for_tests;
        visit::visit_item(self, item);
        self.for_tests = before;
    }

    fn visit_item_mod(&mut self, declared: &'a ItemMod) {
        declared.attrs.iter().for_each(|attribute| self.visit_attribute(attribute));
        let here = Some(self.at);
        let children: Vec<usize> = match &declared.content {
            Some((_, content)) => vec![self.module(self.modules[self.at].file, here, content)],
            None => self.places(declared).iter().filter_map(|place| self.file(place, here)).collect(),
        };
        self.modules[self.at].children.entry(declared.ident.to_string()).or_default().extend(children);
    }

    fn visit_item_use(&mut self, item: &'a ItemUse) {
        item.attrs.iter().for_each(|attribute| self.visit_attribute(attribute));
        if item.leading_colon.is_none() {
            self.import(&item.tree, &mut Vec::new());
        }
    }

    fn visit_path(&mut self, path: &'a Path) {
        if let Some(first) =
            path.segments.first().filter(|_| path.leading_colon.is_none() && path.segments.len() > 1)
        {
            let names = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
            self.path(names, first.ident.span().start().line);
        }
        visit::visit_path(self, path);
    }

    /// The input of a macro call, or the body of a macro's definition.
    fn visit_token_stream(&mut self, tokens: &'a TokenStream) {
        let mut paths = Vec::new();
        paths_in(tokens.clone(), &mut paths);
        paths.into_iter().filter(|(path, _)| path.len() > 1).for_each(|(path, line)| self.path(path, line));
    }

    fn visit_attribute(&mut self, attribute: &'a Attribute) {
        self.for_tests |= is_for_tests(attribute);
    }

    /// Skipped: `pub(in crate::exec)` needs nothing of the module that it names.
    fn visit_visibility(&mut self, _: &'a Visibility) {}
}
