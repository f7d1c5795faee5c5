//! Processors: what a model is to a guest under one QEMU, and how it is made to be the same under
//! another.
//!
//! A model's name alone promises little. `max` can do more under a newer QEMU, and of a named model
//! the emulator leaves out what it cannot do. So a processor is known by the features its guest
//! finds on, and a processor that must continue elsewhere is started there with exactly these:
//!
//! ```text
//!   model -> Expansion (what QEMU makes of it) - what is unwanted here ------> Cpu
//!   Cpu of a state, and the expansion of its model here: too much is off, too little is an error
//! ```
//!
//! Always: what came with a state is taken apart and put together anew, so nothing in it but a
//! model, its options and the names of features reaches QEMU's arguments.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::accel::Accel;
use crate::arch::Arch;
use crate::error::Error;

/// The emulator's `max` has other numbers in other versions, and guests see them.
const MAX_X86_64: &str = "max,family=15,model=107,stepping=1";

/// Off under the emulator, where a model has them on. Five-level paging crashes the guest under the
/// emulator of 7.2. A guest that sees `rep movsb` and `rep stosb` marked as fast copies and clears
/// with them, which is the slowest way under emulation: 48 MB/s through a pipe instead of 166.
/// `pcommit` no processor ever had, nor has the emulator of 10.0.
const UNWANTED_X86_64: [&str; 7] = ["la57", "erms", "fsrm", "fsrs", "fsrc", "fzrm", "pcommit"];

/// Nested virtualisation lets a guest reach the host kernel's code for guests of guests. Under the
/// emulator there is no such code.
const NESTING_X86_64: [&str; 2] = ["svm", "vmx"];

/// The most features a processor of a state may name: twice what the newest QEMU knows.
const FEATURES_MAX: usize = 1024;

/// Which processor a fresh machine gets.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuChoice<'a> {
    /// A model of QEMU; the best there is without one.
    pub model: Option<&'a str>,
    pub nesting: Nesting,
}

/// Whether a guest under KVM can run guests of its own by KVM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Nesting {
    #[default]
    Off,
    On,
}

/// A processor as machines are started with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cpu {
    /// What follows `-cpu`.
    pub argument: String,
    /// What its guest finds on, sorted. Empty: unknown.
    pub features: Vec<String>,
}

impl Cpu {
    /// As it was started once, without a record of the features that its guest found.
    pub fn unexamined(argument: &str) -> Result<Cpu, Error> {
        Ok(Cpu {
            argument: argument.parse::<Model>()?.to_string(),
            features: Vec::new(),
        })
    }

    /// The processor of a fresh machine, without the features that its accelerator gets wrong.
    pub(crate) fn fresh(
        arch: Arch,
        accel: Accel,
        model: Model,
        expansion: &Expansion,
        wrong: &[String],
    ) -> Cpu {
        let emulated = (arch, accel) == (Arch::X86_64, Accel::Tcg);
        let is_unwanted = |feature: &String| {
            emulated && (UNWANTED_X86_64.contains(&feature.as_str()) || wrong.contains(feature))
        };
        let features: BTreeSet<String> = expansion
            .0
            .iter()
            .filter(|feature| !is_unwanted(feature))
            .cloned()
            .collect();
        model.with(expansion, &features)
    }

    /// Whether a guest with this processor can run guests of its own by KVM.
    pub fn nests(&self) -> bool {
        self.features
            .iter()
            .any(|feature| NESTING_X86_64.contains(&feature.as_str()))
    }
}

/// A model with its options, as they follow `-cpu`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Model {
    pub name: String,
    options: Vec<(String, String)>,
}

impl Model {
    /// The model that is chosen, or the best there is.
    pub fn chosen(arch: Arch, accel: Accel, choice: CpuChoice<'_>) -> Result<Model, Error> {
        let best = match (accel, arch) {
            (Accel::Tcg, Arch::X86_64) => MAX_X86_64,
            // The architected pointer authentication is most of the time of an emulated guest.
            (Accel::Tcg, Arch::Aarch64) => "max,pauth-impdef=on",
            (Accel::Whpx, _) => "max",
            (Accel::Kvm | Accel::Hvf, _) => "host",
        };
        let mut model: Model = match choice.model {
            None => best.parse()?,
            Some(name) if is_word(name) => Model {
                name: name.into(),
                options: Vec::new(),
            },
            Some(name) => return Err(not_a_cpu(name)),
        };
        if (accel, arch, choice.nesting) == (Accel::Kvm, Arch::X86_64, Nesting::Off) {
            // Before QEMU expands the model: what depends on them goes with them.
            model
                .options
                .extend(NESTING_X86_64.map(|feature| (feature.to_owned(), "off".to_owned())));
        }
        Ok(model)
    }

    /// Without what is switched off.
    pub fn bare(self) -> Model {
        let options = self
            .options
            .into_iter()
            .filter(|(_, value)| value != "off")
            .collect();
        Model { options, ..self }
    }

    /// The options as QMP takes them.
    pub fn properties(&self) -> BTreeMap<&str, Value> {
        self.options
            .iter()
            .map(|(name, value)| (name.as_str(), property(value)))
            .collect()
    }

    /// This model with exactly these features, which the expansion has all of.
    fn with(mut self, expansion: &Expansion, features: &BTreeSet<String>) -> Cpu {
        let off = expansion
            .0
            .difference(features)
            .map(|feature| (feature.clone(), "off".to_owned()));
        self.options.extend(off);
        Cpu {
            argument: self.to_string(),
            features: features.iter().cloned().collect(),
        }
    }
}

fn property(value: &str) -> Value {
    match (value, value.parse::<u64>()) {
        ("on", _) => json!(true),
        ("off", _) => json!(false),
        (_, Ok(number)) => json!(number),
        (text, Err(_)) => json!(text),
    }
}

impl FromStr for Model {
    type Err = Error;

    fn from_str(argument: &str) -> Result<Model, Error> {
        let mut words = argument.split(',');
        let name = words
            .next()
            .filter(|name| is_word(name))
            .ok_or_else(|| not_a_cpu(argument))?;
        let option = |word: &str| {
            let (name, value) = word.split_once('=')?;
            (is_word(name) && is_word(value)).then(|| (name.to_owned(), value.to_owned()))
        };
        let options = words
            .map(option)
            .collect::<Option<_>>()
            .ok_or_else(|| not_a_cpu(argument))?;
        Ok(Model {
            name: name.to_owned(),
            options,
        })
    }
}

impl fmt::Display for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        self.options
            .iter()
            .try_for_each(|(name, value)| write!(f, ",{name}={value}"))
    }
}

fn not_a_cpu(text: &str) -> Error {
    let text: String = text.chars().take(100).collect();
    Error::Spec {
        detail: format!("{text:?} is not the name of a processor"),
    }
}

/// What may be the name of a model or feature, or a value: nothing that has a meaning in an
/// argument.
fn is_word(text: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    (1..=64).contains(&text.len()) && text.bytes().all(allowed)
}

/// The features that one QEMU switches on for a model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Expansion(pub BTreeSet<String>);

impl Expansion {
    /// What QEMU makes of a model here, which is to be just as the processor was elsewhere; or what
    /// it lacks.
    pub fn same(&self, model: Model, then: &Cpu) -> Result<Cpu, Error> {
        if then.features.len() > FEATURES_MAX
            || !then.features.iter().all(|feature| is_word(feature))
        {
            return Err(not_a_cpu(&then.argument));
        }
        let wanted: BTreeSet<String> = then.features.iter().cloned().collect();
        let lacking: Vec<String> = wanted.difference(&self.0).cloned().collect();
        if !lacking.is_empty() {
            return Err(Error::CpuLacks { features: lacking });
        }
        Ok(model.with(self, &wanted))
    }
}

/// The expansions that are known, by accelerator and model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Expansions(BTreeMap<String, Expansion>);

impl Expansions {
    pub fn find(&self, accel: Accel, model: &Model) -> Option<&Expansion> {
        self.0.get(&key(accel, model))
    }

    pub fn insert(&mut self, accel: Accel, model: &Model, expansion: Expansion) {
        self.0.insert(key(accel, model), expansion);
    }
}

fn key(accel: Accel, model: &Model) -> String {
    format!("{accel} {model}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expansion(features: &[&str]) -> Expansion {
        Expansion(
            features
                .iter()
                .map(|feature| (*feature).to_owned())
                .collect(),
        )
    }

    fn cpu(argument: &str, features: &[&str]) -> Cpu {
        Cpu {
            argument: argument.into(),
            features: features
                .iter()
                .map(|feature| (*feature).to_owned())
                .collect(),
        }
    }

    #[test]
    fn a_fresh_processor_has_off_what_is_unwanted_and_there() {
        let fresh = |accel, model: &str, on: &[&str]| {
            Cpu::fresh(
                Arch::X86_64,
                accel,
                model.parse().unwrap(),
                &expansion(on),
                &["adx".to_owned()],
            )
        };
        assert_eq!(
            fresh(Accel::Tcg, "max", &["avx", "la57", "pcommit"]),
            cpu("max,la57=off,pcommit=off", &["avx"])
        );
        assert_eq!(
            fresh(Accel::Tcg, "Westmere", &["avx"]),
            cpu("Westmere", &["avx"])
        );
        assert_eq!(
            fresh(Accel::Tcg, "max", &["adx", "avx"]),
            cpu("max,adx=off", &["avx"])
        );
        assert_eq!(
            fresh(Accel::Kvm, "host", &["adx", "la57"]),
            cpu("host", &["adx", "la57"])
        );
    }

    #[test]
    fn under_kvm_nested_virtualisation_is_off_unless_asked_for() {
        let chosen = |accel, model, nesting| {
            Model::chosen(Arch::X86_64, accel, CpuChoice { model, nesting })
                .unwrap()
                .to_string()
        };
        assert_eq!(
            chosen(Accel::Kvm, None, Nesting::Off),
            "host,svm=off,vmx=off"
        );
        assert_eq!(
            chosen(Accel::Kvm, Some("EPYC"), Nesting::Off),
            "EPYC,svm=off,vmx=off"
        );
        assert_eq!(chosen(Accel::Kvm, None, Nesting::On), "host");
        assert_eq!(chosen(Accel::Tcg, Some("max"), Nesting::Off), "max");
        assert!(cpu("host", &["avx", "vmx"]).nests() && !cpu("host", &["avx"]).nests());
    }

    #[test]
    fn the_same_processor_elsewhere_has_off_what_is_new_there() {
        let then = cpu("max,family=15,pcommit=off", &["avx", "sse"]);
        let model = then.argument.parse::<Model>().unwrap().bare();
        let newer = expansion(&["avx", "sse", "rdseed"]);
        assert_eq!(
            newer.same(model.clone(), &then).unwrap(),
            cpu("max,family=15,rdseed=off", &["avx", "sse"])
        );
        let older = expansion(&["avx"]);
        assert!(
            matches!(older.same(model, &then), Err(Error::CpuLacks { features }) if features == ["sse"])
        );
    }

    #[test]
    fn nothing_from_a_state_can_say_more_than_a_model_and_features() {
        for argument in [
            "",
            ",",
            "max,",
            "max,check",
            "max,a=b=c",
            "max -device x",
            "max,x=a/b",
            &"a".repeat(65),
        ] {
            assert!(argument.parse::<Model>().is_err(), "{argument:?}");
        }
        assert!(
            Model::chosen(
                Arch::X86_64,
                Accel::Tcg,
                CpuChoice {
                    model: Some("max,la57=on"),
                    ..Default::default()
                }
            )
            .is_err()
        );
        let model: Model = "max".parse().unwrap();
        for feature in ["a,b=on", "", "a=on", "é"] {
            assert!(
                expansion(&["avx"])
                    .same(model.clone(), &cpu("max", &[feature]))
                    .is_err(),
                "{feature:?}"
            );
        }
        let many: Vec<String> = (0..=FEATURES_MAX)
            .map(|number| format!("f{number}"))
            .collect();
        let all = Expansion(many.iter().cloned().collect());
        assert!(
            all.same(
                model,
                &Cpu {
                    argument: "max".into(),
                    features: many
                }
            )
            .is_err()
        );
    }

    #[test]
    fn options_become_properties_of_their_kind() {
        let model: Model = "max,family=15,la57=off,pauth-impdef=on,vendor=AuthenticAMD"
            .parse()
            .unwrap();
        let properties = serde_json::to_value(model.properties()).unwrap();
        assert_eq!(
            properties,
            json!({"family": 15, "la57": false, "pauth-impdef": true, "vendor": "AuthenticAMD"})
        );
        assert_eq!(
            model.bare().to_string(),
            "max,family=15,pauth-impdef=on,vendor=AuthenticAMD"
        );
    }
}
