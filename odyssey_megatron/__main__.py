"""Make ``python -m odyssey_megatron`` the same as the command ``odyssey``."""

if __name__ == "__main__":
    try:
        from odyssey_megatron.cli import run_and_end
    except KeyboardInterrupt:
        raise SystemExit(130) from None  # 128 + SIGINT; nothing has begun
    run_and_end()
