"""The stand-in's `extract_answer`: what stands in the last pair of tags, None without one."""

import re


def extract_answer(completion, tag_name="answer", strip=True):
    found = re.findall(f"<{tag_name}>(.*?)</{tag_name}>", completion, re.DOTALL)
    return None if not found else found[-1].strip() if strip else found[-1]
