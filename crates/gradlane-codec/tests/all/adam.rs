//! Adam fused with the mean: every variant against the oracle at every length and with every
//! combination of options, numbers from torch, what is refused.

use std::num::NonZeroU32;

use crate::common::{assert_same, Numbers, Placed};
use gradlane_codec::{
    reduce_adam, reduce_adam_slices, AdamError, AdamMemory, AdamOptions, AdamSlices, AdamStep,
    Buffer, FloatDtype, InstructionSet, Mean, ReduceError,
};

fn mean(dtype: FloatDtype, divisor: u32) -> Mean {
    Mean::of_all(dtype, NonZeroU32::new(divisor).unwrap())
}

/// Every combination of the options that changes which operations are done.
fn option_combinations() -> Vec<AdamOptions> {
    (0..16_u32)
        .map(|choice| {
            let on = |bit: u32| choice & (1 << bit) != 0;
            AdamOptions {
                lr: 0.07,
                beta1: if on(0) { 0.9 } else { 0.25 },
                beta2: 0.99,
                weight_decay: if on(1) { 1e-2 } else { 0.0 },
                decoupled_weight_decay: on(2),
                maximize: on(3),
                ..AdamOptions::with_lr(0.07)
            }
        })
        .collect()
}

/// Compares all variants with the oracle for one shape, also with parameters updated in place.
fn check_shape(dtype: FloatDtype, length: usize, step: AdamStep, offset: usize) {
    let mut numbers = Numbers((length * 16 + offset) as u64);
    let inputs: Vec<Placed> = (0..1 + length % 4)
        .map(|index| Placed::holding(&numbers.elements(dtype, length), offset + index))
        .collect();
    let contents: Vec<&[u8]> = inputs.iter().map(Placed::as_ref).collect();
    let parameters = Placed::holding(&numbers.elements(dtype, length), offset + 3);
    let state_dtype = dtype.accumulator();
    let averages = Placed::holding(&numbers.elements(state_dtype, length), offset + 1);
    let squares = Placed::holding(&numbers.elements(state_dtype, length), offset + 6);
    let how = Mean { add_zero: length.is_multiple_of(3), ..mean(dtype, 1 + (length % 5) as u32) };
    let bytes = parameters.as_ref().len();
    let mut expected = None;
    for instruction_set in InstructionSet::available() {
        let what = || format!("{dtype} {instruction_set} {length} elements, +{offset}, {step:?}");
        let mut output = Placed::room(bytes, offset + 2);
        let mut second = Placed::room(bytes, offset + 5);
        let (mut exp_avg, mut exp_avg_sq) = (averages.clone(), squares.clone());
        let memory = AdamSlices {
            parameters: parameters.as_ref(),
            exp_avg: exp_avg.as_mut(),
            exp_avg_sq: exp_avg_sq.as_mut(),
            output: output.as_mut(),
            copy_to: Some(second.as_mut()),
        };
        reduce_adam_slices(instruction_set, how, step, &contents, memory).unwrap();
        for buffer in [&output, &second, &exp_avg, &exp_avg_sq] {
            buffer.assert_guards();
        }
        assert_eq!(output.as_ref(), second.as_ref(), "{}", what());
        let (expected_output, expected_avg, expected_sq) =
            expected.get_or_insert_with(|| (output.clone(), exp_avg.clone(), exp_avg_sq.clone()));
        assert_same(dtype, output.as_ref(), expected_output.as_ref(), &what);
        assert_same(state_dtype, exp_avg.as_ref(), expected_avg.as_ref(), &what);
        assert_same(state_dtype, exp_avg_sq.as_ref(), expected_sq.as_ref(), &what);
    }

    let (mut in_place, mut exp_avg, mut exp_avg_sq) = (parameters, averages, squares);
    let pointers: Vec<*const u8> = contents.iter().map(|one| one.as_ptr()).collect();
    let target = in_place.as_mut().as_mut_ptr();
    let memory = AdamMemory {
        parameters: target,
        exp_avg: exp_avg.as_mut().as_mut_ptr(),
        exp_avg_sq: exp_avg_sq.as_mut().as_mut_ptr(),
        output: target,
        copy_to: None,
    };
    // SAFETY: all buffers have `length` elements; the output is exactly the parameters.
    unsafe { reduce_adam(how, step, &pointers, memory, length) }.unwrap();
    let (expected_output, _, _) = expected.unwrap();
    assert_same(dtype, in_place.as_ref(), expected_output.as_ref(), &|| "in place".to_owned());
}

#[test]
fn every_length_gives_the_bits_of_the_oracle() {
    let combinations = option_combinations();
    for dtype in FloatDtype::ALL {
        for length in 0..=300 {
            for turn in 0..2 {
                let options = combinations[(2 * length + turn) % combinations.len()];
                let step = AdamStep { options, number: 1 + (length % 7) as u64 };
                check_shape(dtype, length, step, length % 8);
            }
        }
    }
}

#[test]
fn every_combination_of_options_gives_the_bits_of_the_oracle() {
    for dtype in FloatDtype::ALL {
        for options in option_combinations() {
            for number in [1, 1_000, 10_000_000_000] {
                check_shape(dtype, 149, AdamStep { options, number }, 3);
            }
        }
    }
}

#[test]
fn any_cut_gives_the_same_bits() {
    let (dtype, length) = (FloatDtype::F32, 300);
    let mut numbers = Numbers(5);
    let gradient = numbers.plain_elements(dtype, length);
    let parameters = numbers.plain_elements(dtype, length);
    let step = AdamStep { options: AdamOptions::with_lr(0.1), number: 3 };
    let run = |cut: usize| {
        let (mut output, mut averages, mut squares) =
            (vec![0; 4 * length], vec![0; 4 * length], vec![0; 4 * length]);
        for start in (0..length).step_by(cut) {
            let range = 4 * start..4 * length.min(start + cut);
            let memory = AdamSlices {
                parameters: &parameters[range.clone()],
                exp_avg: &mut averages[range.clone()],
                exp_avg_sq: &mut squares[range.clone()],
                output: &mut output[range.clone()],
                copy_to: None,
            };
            let inputs = [&gradient[range]];
            reduce_adam_slices(InstructionSet::active(), mean(dtype, 1), step, &inputs, memory)
                .unwrap();
        }
        (output, averages, squares)
    };
    let whole = run(length);
    for cut in [1, 3, 7, 64, 299] {
        assert_eq!(run(cut), whole, "by {cut}");
    }
}

const START: [u32; 5] = [0xbef9_3b54, 0xbf1a_940d, 0xbf0e_df65, 0x3f2a_e2df, 0xbe4a_272f];
const GRADIENTS: [[u32; 5]; 3] = [
    [0x3f15_34ae, 0xbed7_4d2b, 0xbe6a_41f0, 0x3e41_e8a5, 0xbe8a_1b6f],
    [0xbe2b_5aaa, 0x3e54_3056, 0x3d88_adb6, 0xbe4c_aa17, 0x3e52_5275],
    [0x3e30_5553, 0xbe33_0fc3, 0x3e6b_e962, 0x3c8c_4f99, 0xbeb6_b01d],
];

/// One row of the table: options; parameters, exp_avg and exp_avg_sq after three steps.
type Row = (AdamOptions, [u32; 5], [u32; 5], [u32; 5]);

/// What `torch.optim.Adam(foreach=False)` and `AdamW` of torch 2.15 give with
/// `ATEN_CPU_CAPABILITY=default`, which is the setting in which torch fuses no multiply-add. (For
/// none of these numbers is torch's square root another than the correctly rounded one.)
fn torch_table() -> Vec<Row> {
    let adam = AdamOptions::with_lr;
    vec![
        (
            adam(0.001),
            [0xbefa_3985, 0xbf1a_2525, 0xbf0e_8ea8, 0x3f2a_a7f9, 0xbe48_86a2],
            [0x3d4a_376e, 0xbd06_c082, 0x3c2c_44f8, 0xba75_94d4, 0xbd1f_ed87],
            [0x39cf_f4c1, 0x3983_0b90, 0x38e6_2c73, 0x389f_5b7d, 0x397d_d521],
        ),
        (
            AdamOptions { weight_decay: 0.1, ..adam(0.01) },
            [0xbf01_0bcf, 0xbf15_7e0d, 0xbf0a_773c, 0x3f26_c4d3, 0xbe38_9a1f],
            [0x3d13_43ee, 0xbd48_d381, 0xbb8e_bd84, 0x3c8a_c222, 0xbd34_ff62],
            [0x39b5_c965, 0x39a1_1d7a, 0x38ea_e95c, 0x38bd_4ac1, 0x3987_fa4f],
        ),
        (
            AdamOptions { beta1: 0.3, beta2: 0.95, eps: 1e-6, maximize: true, ..adam(0.01) },
            [0xbef2_3d80, 0xbf1d_a09b, 0xbf0f_3e7a, 0x3f2b_b2c3, 0xbe58_85e6],
            [0xbdfa_18fc, 0x3dd7_d2a7, 0xbe24_bb2e, 0x3c93_e377, 0x3e64_ff3a],
            [0x3c94_9d9e, 0x3c3d_334a, 0x3bab_46e0, 0x3b67_5c40, 0x3c3e_ebc3],
        ),
        (
            AdamOptions { beta1: 0.0, beta2: 0.5, weight_decay: 0.01, ..adam(0.02) },
            [0xbf02_7c34, 0xbf15_0973, 0xbf11_d9d1, 0x3f29_ea04, 0xbe30_3202],
            [0x3e2b_3dca, 0xbe39_2ddf, 0x3e66_5080, 0x3cc2_fcaf, 0xbeb7_b002],
            [0x3d81_5ee8, 0x3d49_a81c, 0x3d07_9399, 0x3c6c_8a9f, 0x3dab_eddf],
        ),
        (
            AdamOptions { weight_decay: 0.01, decoupled_weight_decay: true, ..adam(0.001) },
            [0xbefa_3799, 0xbf1a_23f6, 0xbf0e_8d8e, 0x3f2a_a6a9, 0xbe48_8515],
            [0x3d4a_376e, 0xbd06_c082, 0x3c2c_44f8, 0xba75_94d4, 0xbd1f_ed87],
            [0x39cf_f4c1, 0x3983_0b90, 0x38e6_2c73, 0x389f_5b7d, 0x397d_d521],
        ),
        (
            AdamOptions { weight_decay: 0.1, decoupled_weight_decay: true, ..adam(0.01) },
            [0xbf01_336a, 0xbf15_c9e2, 0xbf0b_4bfc, 0x3f28_140c, 0xbe39_4c0f],
            [0x3d4a_376e, 0xbd06_c082, 0x3c2c_44f8, 0xba75_94d4, 0xbd1f_ed87],
            [0x39cf_f4c1, 0x3983_0b90, 0x38e6_2c73, 0x389f_5b7d, 0x397d_d521],
        ),
        (
            AdamOptions {
                beta1: 0.3,
                beta2: 0.95,
                eps: 1e-6,
                weight_decay: 0.01,
                decoupled_weight_decay: true,
                maximize: true,
                ..adam(0.01)
            },
            [0xbef2_2a9f, 0xbf1d_949d, 0xbf0f_3360, 0x3f2b_a58b, 0xbe58_75f4],
            [0xbdfa_18fc, 0x3dd7_d2a7, 0xbe24_bb2e, 0x3c93_e377, 0x3e64_ff3a],
            [0x3c94_9d9e, 0x3c3d_334a, 0x3bab_46e0, 0x3b67_5c40, 0x3c3e_ebc3],
        ),
        (
            AdamOptions {
                beta1: 0.0,
                beta2: 0.5,
                weight_decay: 0.01,
                decoupled_weight_decay: true,
                ..adam(0.02)
            },
            [0xbf02_8d9b, 0xbf15_2279, 0xbf12_06e9, 0x3f2a_3221, 0xbe30_4096],
            [0x3e30_5553, 0xbe33_0fc3, 0x3e6b_e962, 0x3c8c_4f99, 0xbeb6_b01d],
            [0x3d83_aa01, 0x3d45_20e6, 0x3d0c_0e4c, 0x3c6f_770d, 0x3daa_98b4],
        ),
    ]
}

fn repeated(bits: &[u32; 5], repeat: usize) -> Vec<u8> {
    let once: Vec<u8> = bits.iter().flat_map(|bits| bits.to_ne_bytes()).collect();
    once.repeat(repeat)
}

#[test]
fn three_steps_give_the_bits_of_torch_without_fused_operations() {
    let repeat = 31;
    for (options, parameters, exp_avg, exp_avg_sq) in torch_table() {
        for instruction_set in InstructionSet::available() {
            let mut found = repeated(&START, repeat);
            let (mut averages, mut squares) = (vec![0; found.len()], vec![0; found.len()]);
            for (number, gradient) in (1..).zip(&GRADIENTS) {
                let before = found.clone();
                let memory = AdamSlices {
                    parameters: &before,
                    exp_avg: &mut averages,
                    exp_avg_sq: &mut squares,
                    output: &mut found,
                    copy_to: None,
                };
                let gradient = repeated(gradient, repeat);
                let step = AdamStep { options, number };
                reduce_adam_slices(
                    instruction_set,
                    mean(FloatDtype::F32, 1),
                    step,
                    &[&gradient],
                    memory,
                )
                .unwrap();
            }
            assert_eq!(found, repeated(&parameters, repeat), "{instruction_set} {options:?}");
            assert_eq!(averages, repeated(&exp_avg, repeat), "{instruction_set} {options:?}");
            assert_eq!(squares, repeated(&exp_avg_sq, repeat), "{instruction_set} {options:?}");
        }
    }
}

#[test]
fn numbers_by_hand() {
    // beta1 = 0.5 and beta2 = 0.75 keep the first step exact. Ranks give 5 and 3: g = 4.
    // m = 4 - (4 - 0) * (1 - 0.5) = 2; v = (0.25 * 4) * 4 = 4; 1 - beta2 = 0.25, whose root is 0.5.
    // d = 2 / 0.5 + 0 = 4; p = 8 * (1 - 0.5 * 0.25) + (-(0.5 / 0.5) * 2) / 4 = 7 - 0.5 = 6.5.
    let options = AdamOptions {
        beta1: 0.5,
        beta2: 0.75,
        eps: 0.0,
        weight_decay: 0.25,
        decoupled_weight_decay: true,
        ..AdamOptions::with_lr(0.5)
    };
    let values = |value: f32| value.to_ne_bytes().repeat(37);
    for instruction_set in InstructionSet::available() {
        let (mut output, mut averages, mut squares) = (values(0.0), values(0.0), values(0.0));
        let memory = AdamSlices {
            parameters: &values(8.0),
            exp_avg: &mut averages,
            exp_avg_sq: &mut squares,
            output: &mut output,
            copy_to: None,
        };
        let (first, second) = (values(5.0), values(3.0));
        let step = AdamStep { options, number: 1 };
        reduce_adam_slices(
            instruction_set,
            mean(FloatDtype::F32, 2),
            step,
            &[&first, &second],
            memory,
        )
        .unwrap();
        assert_eq!(output, values(6.5), "{instruction_set}");
        assert_eq!(averages, values(2.0), "{instruction_set}");
        assert_eq!(squares, values(4.0), "{instruction_set}");
    }
}

#[test]
fn options_that_torch_refuses_are_refused() {
    assert_eq!(AdamOptions::with_lr(0.0).validate(), Ok(()));
    let negative = AdamOptions::with_lr(-0.1).validate();
    assert_eq!(negative, Err(AdamError::BadOption { option: "lr", value: -0.1 }));
    let not_a_number = AdamOptions { eps: f64::NAN, ..AdamOptions::with_lr(0.1) };
    assert!(not_a_number.validate().is_err());
    for value in [-0.1, 1.0, f64::NAN] {
        let first = AdamOptions { beta1: value, ..AdamOptions::with_lr(0.1) };
        let second = AdamOptions { beta2: value, ..AdamOptions::with_lr(0.1) };
        assert!(matches!(first.validate(), Err(AdamError::BadBeta { option: "beta1", .. })));
        assert!(matches!(second.validate(), Err(AdamError::BadBeta { option: "beta2", .. })));
    }
}

#[test]
fn misfit_buffers_and_step_zero_are_refused_untouched() {
    let parameters = vec![0_u8; 16];
    let mut output = vec![0x77; 16];
    let (mut right, mut short) = (vec![0x77; 32], vec![0x77; 8]);
    let options = AdamOptions::with_lr(0.1);
    let how = mean(FloatDtype::F16, 1);
    let memory = AdamSlices {
        parameters: &parameters,
        exp_avg: &mut right,
        exp_avg_sq: &mut short,
        output: &mut output,
        copy_to: None,
    };
    let step = AdamStep { options, number: 1 };
    let error = reduce_adam_slices(InstructionSet::active(), how, step, &[&parameters], memory);
    let expected = ReduceError::Length { buffer: Buffer::ExpAvgSq, bytes: 8, expected_bytes: 32 };
    assert_eq!(error, Err(AdamError::Buffers(expected)));
    let mut other = right.clone();
    let memory = AdamSlices {
        parameters: &parameters,
        exp_avg: &mut right,
        exp_avg_sq: &mut other,
        output: &mut output,
        copy_to: None,
    };
    let step = AdamStep { options, number: 0 };
    let error = reduce_adam_slices(InstructionSet::active(), how, step, &[&parameters], memory);
    assert_eq!(error, Err(AdamError::StepZero));
    assert!(output.iter().chain(&right).chain(&other).all(|byte| *byte == 0x77));
}
