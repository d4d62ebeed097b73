//! Figures that show whether the code of `engine/` and `plan/` grows: counted from the syntax, without tests. Functions that macros
//! generate are not seen.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::RangeInclusive;
use std::path::Path;

use proc_macro2::{Span, TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{Attribute, FnArg, Ident, ImplItem, Item, Type, Visibility};

use crate::files::{self, SourceFile, is_rust};
use crate::modules::is_for_tests;

/// The folders that are counted.
const COUNTED: [&str; 2] = ["engine/", "plan/"];
/// How many structs are listed: those with the most fields.
const LARGEST_STRUCTS: usize = 5;
/// Tuples with fewer elements are not counted.
const LEAST_ELEMENTS: usize = 3;
/// Files with more lines than this are listed.
const LONG_FILE: usize = 600;

/// Counts what is in the repository; an error says which file cannot be read.
pub(crate) fn told(root: &Path) -> Result<String, String> {
    let mut unread = Vec::new();
    let files = files::all(root, &mut unread);
    let counted: Vec<SourceFile> = files.into_iter().filter(is_counted).collect();
    let syntax = files::syntax(&counted, &mut unread);
    let mut figures = Figures::default();
    counted.iter().for_each(|file| _ = syntax.get(&*file.path).map(|syntax| figures.read(file, syntax)));
    if unread.is_empty() { Ok(figures.to_string()) } else { Err(unread.join("\n")) }
}

/// Whether a file is in Rust, in one of the folders [`COUNTED`], and not for tests.
fn is_counted(file: &SourceFile) -> bool {
    let mut parts = file.path.trim_end_matches(".rs").split('/');
    let is_there = COUNTED.iter().any(|folder| file.path.starts_with(folder));
    is_there && is_rust(&file) && !parts.any(|part| ["tests", "testing"].contains(&part))
}

#[derive(Default)]
struct Figures {
    /// Lines with code, of each folder.
    code: BTreeMap<String, usize>,
    /// Each struct: the number of its fields, then its name and place.
    structs: Vec<(usize, String)>,
    /// The places of tuples in the types of parameters.
    tuples: Vec<String>,
    /// For each name of a public type, the places that define one. Other crates can use every `pub` type: the compiler's lint
    /// `unreachable_pub` allows no other `pub`.
    public: BTreeMap<String, Vec<String>>,
    methods_of_endpoint: usize,
    files_of_endpoint: BTreeSet<String>,
    long_files: Vec<String>,
    /// The file that is read now.
    file: String,
    /// The lines of this file's modules for tests.
    tests: Vec<RangeInclusive<usize>>,
    /// This file's type aliases for tuples.
    aliases: BTreeSet<String>,
    /// Whether the type that is read now is that of a parameter.
    in_parameter: bool,
    /// Whether the module that is read now is private and inline (`mod a { }`), so that other crates cannot name its types: traits that
    /// only this crate may implement stand in such modules.
    is_sealed: bool,
}

impl Figures {
    fn read(&mut self, file: &SourceFile, syntax: &syn::File) {
        self.file.clone_from(&file.path);
        self.tests.clear();
        let aliases = syntax.items.iter().filter_map(|item| match item {
            Item::Type(alias) if is_tuple(&alias.ty) => Some(alias.ident.to_string()),
            _ => None,
        });
        self.aliases = aliases.collect();
        self.visit_file(syntax);
        let mut lines = BTreeSet::new();
        code_lines(file.text.parse().unwrap_or_default(), &mut lines);
        lines.retain(|line| !self.tests.iter().any(|test| test.contains(line)));
        let folder = file.path.split('/').next().unwrap_or_default();
        *self.code.entry(folder.into()).or_default() += lines.len();
        let length = file.text.lines().count();
        if length > LONG_FILE {
            self.long_files.push(format!("{}: {length} lines", file.path));
        }
    }

    fn place(&self, span: Span) -> String {
        format!("{}:{}", self.file, span.start().line)
    }

    fn name(&mut self, visibility: &Visibility, attributes: &[Attribute], name: &Ident) {
        // The lint is turned off for types that are public only in builds for tests.
        let is_allowed = |attribute: &Attribute| {
            attribute
                .meta
                .require_list()
                .is_ok_and(|list| list.tokens.to_string().contains("unreachable_pub"))
        };
        let is_public = matches!(visibility, Visibility::Public(_)) && !attributes.iter().any(is_allowed);
        if is_public && !self.is_sealed {
            let place = self.place(name.span());
            self.public.entry(name.to_string()).or_default().push(place);
        }
    }
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut list = |title: &str, all: &[String]| {
            writeln!(f, "{title}: {}", all.len())?;
            all.iter().try_for_each(|one| writeln!(f, "    {one}"))
        };
        let code: Vec<String> =
            self.code.iter().map(|(folder, lines)| format!("{folder}: {lines}")).collect();
        list("folders, and their lines of code", &code)?;
        let mut structs: Vec<&(usize, String)> = self.structs.iter().collect();
        structs.sort_by_key(|(fields, _)| std::cmp::Reverse(*fields));
        let most = structs.iter().take(LARGEST_STRUCTS);
        let most: Vec<String> = most.map(|(fields, place)| format!("{fields} {place}")).collect();
        list("structs with most fields", &most)?;
        list("tuples of three and more as parameters", &self.tuples)?;
        let same = self.public.iter().filter(|(_, places)| places.len() > 1);
        let same: Vec<String> = same.map(|(name, places)| format!("{name}: {}", places.join(", "))).collect();
        list("names that several public types have", &same)?;
        list("files longer than 600 lines", &self.long_files)?;
        let (methods, files) = (self.methods_of_endpoint, self.files_of_endpoint.len());
        f.write_str(&format!("methods of Endpoint: {methods}, in {files} files\n"))
    }
}

impl Visit<'_> for Figures {
    fn visit_item_mod(&mut self, module: &syn::ItemMod) {
        if let Some(attribute) = module.attrs.iter().find(|attribute| is_for_tests(attribute)) {
            let end = module.content.as_ref().map(|(brace, _)| brace.span.close());
            let last =
                end.or(module.semi.as_ref().map(|semi| semi.spans[0])).map_or(0, |span| span.end().line);
            return self.tests.push(attribute.pound_token.spans[0].start().line..=last);
        }
        let before = self.is_sealed;
        self.is_sealed |= module.content.is_some() && !matches!(module.vis, Visibility::Public(_));
        visit::visit_item_mod(self, module);
        self.is_sealed = before;
    }

    fn visit_signature(&mut self, signature: &syn::Signature) {
        let typed = signature.inputs.iter().filter_map(|input| match input {
            FnArg::Typed(typed) => Some(&typed.ty),
            FnArg::Receiver(_) => None,
        });
        self.in_parameter = true;
        typed.for_each(|parameter| self.visit_type(parameter));
        self.in_parameter = false;
    }

    fn visit_type(&mut self, parameter: &Type) {
        let span = match parameter {
            Type::Tuple(tuple) if is_tuple(parameter) => Some(tuple.paren_token.span.open()),
            Type::Path(path) => path
                .path
                .segments
                .last()
                .map(|last| &last.ident)
                .filter(|name| self.aliases.contains(&name.to_string()))
                .map(Ident::span),
            _ => None,
        };
        self.tuples.extend(span.filter(|_| self.in_parameter).map(|span| self.place(span)));
        visit::visit_type(self, parameter);
    }

    fn visit_item(&mut self, item: &Item) {
        match item {
            Item::Struct(item) => self.name(&item.vis, &item.attrs, &item.ident),
            Item::Enum(item) => self.name(&item.vis, &item.attrs, &item.ident),
            Item::Union(item) => self.name(&item.vis, &item.attrs, &item.ident),
            Item::Type(item) => self.name(&item.vis, &item.attrs, &item.ident),
            Item::Trait(item) => self.name(&item.vis, &item.attrs, &item.ident),
            _ => {}
        }
        visit::visit_item(self, item);
    }

    fn visit_item_struct(&mut self, item: &syn::ItemStruct) {
        self.structs.push((item.fields.len(), format!("{} ({})", item.ident, self.place(item.ident.span()))));
    }

    /// Enums that macros define: `pub enum NAME` stands in the macro's input.
    fn visit_item_macro(&mut self, item: &syn::ItemMacro) {
        let tokens: Vec<TokenTree> = item.mac.tokens.clone().into_iter().collect();
        for three in tokens.windows(3) {
            if let [TokenTree::Ident(public), TokenTree::Ident(kind), TokenTree::Ident(name)] = three
                && public == "pub"
                && kind == "enum"
            {
                self.name(&Visibility::Public(syn::token::Pub(public.span())), &item.attrs, name);
            }
        }
    }

    fn visit_item_impl(&mut self, item: &syn::ItemImpl) {
        let Type::Path(path) = &*item.self_ty else { return visit::visit_item_impl(self, item) };
        if path.path.segments.last().is_some_and(|last| last.ident == "Endpoint") {
            self.methods_of_endpoint +=
                item.items.iter().filter(|item| matches!(item, ImplItem::Fn(_))).count();
            self.files_of_endpoint.insert(self.file.clone());
        }
        visit::visit_item_impl(self, item);
    }
}

fn is_tuple(of: &Type) -> bool {
    matches!(of, Type::Tuple(tuple) if tuple.elems.len() >= LEAST_ELEMENTS)
}

/// Collects the lines that have something other than a comment. (In the tokens a doc comment is the attribute `#[doc = ...]`.)
fn code_lines(tokens: TokenStream, lines: &mut BTreeSet<usize>) {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let is = |at: usize, sign: char| matches!(tokens.get(at), Some(TokenTree::Punct(punct)) if punct.as_char() == sign);
    let mut at = 0;
    while let Some(token) = tokens.get(at) {
        let attribute = if is(at, '#') { at + 1 + usize::from(is(at + 1, '!')) } else { at };
        match tokens.get(attribute) {
            Some(TokenTree::Group(group))
                if attribute > at && group.stream().to_string().starts_with("doc =") =>
            {
                at = attribute + 1;
                continue;
            }
            _ => at += 1,
        }
        match token {
            TokenTree::Group(group) => {
                lines.extend([group.span_open(), group.span_close()].map(|span| span.end().line));
                code_lines(group.stream(), lines);
            }
            other => lines.extend(other.span().start().line..=other.span().end().line),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Figures {
        let mut figures = Figures::default();
        let file = SourceFile { path: "engine/a.rs".into(), text: text.into() };
        figures.read(&file, &syn::parse_file(text).unwrap());
        figures
    }

    #[test]
    fn lines_of_code_have_neither_comments_nor_tests() {
        let text = "//! What it is.\n\n/// A function.\nfn f() {\n    // A comment.\n    g(\"two\n lines\");\n}\n\
                    #[cfg(test)]\nmod tests {\n    use super::*;\n}\n#[cfg(test)]\nmod more;\n#[inline]\nfn h() {}\n";
        assert_eq!(of(text).code["engine"], 6);
    }

    #[test]
    fn files_of_tests_are_left_out() {
        let counted = ["engine/a.rs", "engine/a/b.rs", "plan/src/tested.rs"];
        let left_out =
            ["engine/testing/a.rs", "engine/a/tests/b.rs", "plan/src/tests.rs", "cli/a.rs", "engine/a.md"];
        let is_counted = |path: &&str| is_counted(&SourceFile { path: (*path).into(), text: String::new() });
        assert!(counted.iter().all(is_counted));
        assert!(!left_out.iter().any(is_counted));
    }

    #[test]
    fn fields_of_structs_are_counted() {
        let structs = of("struct A { a: u8, b: (u8, u8, u8) }\nmod m { struct B(u8); }").structs;
        assert_eq!(structs, [(2, "A (engine/a.rs:1)".into()), (1, "B (engine/a.rs:2)".into())]);
    }

    #[test]
    fn tuples_of_three_are_found_in_the_parameters_of_functions_alone() {
        let text = "type T = (u8, u8, u8);\n\
                    fn a((x, y, z): (u8, u8, u8)) -> (u8, u8, u8) { |p: (u8, u8, u8)| p }\n\
                    impl X { fn b(&self, t: &[(u8, u8, u8)], two: (u8, u8)) { let l: (u8, u8, u8); } }\n\
                    trait Y { fn c(a: u8,\n d: T); }\n\
                    fn d() { fn inner(i: impl Iterator<Item = (u8, u8, u8)>) {} }\n\
                    #[cfg(test)] mod tests { fn e(t: (u8, u8, u8)) {} }";
        assert_eq!(of(text).tuples, ["engine/a.rs:2", "engine/a.rs:3", "engine/a.rs:5", "engine/a.rs:6"]);
    }

    #[test]
    fn public_types_of_one_name_are_found() {
        let text = "pub struct A; pub(crate) struct B; pub enum C {}\n\
                    pub mod m { pub type A = u8; pub struct B; named! { #[x] pub enum C {} } }\n\
                    mod sealed { pub trait D {} } pub trait D {}\n\
                    #[cfg_attr(x, allow(unreachable_pub))] pub struct E; mod n { pub struct F; }\npub struct E;";
        let told = of(text).to_string();
        let same = "names that several public types have: 2\n    A: engine/a.rs:1, engine/a.rs:2\n    \
                    C: engine/a.rs:1, engine/a.rs:2\n";
        assert!(told.contains(same), "{told}");
    }

    #[test]
    fn methods_of_the_endpoint_and_long_files_are_told() {
        let text = "impl<R> Endpoint<R> { fn a() {} const B: u8 = 1; }\nimpl T for super::Endpoint { fn c() {} }\n\
                    impl Other { fn d() {} }";
        let told = of(&(text.to_string() + &"\n".repeat(600))).to_string();
        assert!(told.contains("methods of Endpoint: 2, in 1 files"), "{told}");
        assert!(told.contains("longer than 600 lines: 1\n    engine/a.rs: 602 lines"), "{told}");
    }
}
