"""PDF files with a line of text on each page."""

from __future__ import annotations


def pdf_of(*lines: str) -> bytes:
    """Return a file with a page for each line of ASCII text, which may be empty."""
    kids = " ".join(f"{4 + 2 * n} 0 R" for n in range(len(lines)))
    objects = [
        "<</Type/Catalog/Pages 2 0 R>>",
        f"<</Type/Pages/Kids[{kids}]/Count {len(lines)}>>",
        "<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]
    for n, line in enumerate(lines):
        resources = "/Resources<</Font<</F 3 0 R>>>>/MediaBox[0 0 300 300]"
        objects.append(f"<</Type/Page/Parent 2 0 R{resources}/Contents {5 + 2 * n} 0 R>>")
        drawn = f"BT /F 12 Tf 20 200 Td ({line}) Tj ET" if line else ""
        objects.append(f"<</Length {len(drawn)}>>stream\n{drawn}\nendstream")
    data, places = b"%PDF-1.4\n", []
    for number, each in enumerate(objects, 1):
        places.append(len(data))
        data += f"{number} 0 obj{each}endobj\n".encode()
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    size = len(objects) + 1
    end = f"xref\n0 {size}\n0000000000 65535 f \n{table}trailer<</Size {size}/Root 1 0 R>>"
    return data + f"{end}\nstartxref\n{len(data)}\n%%EOF\n".encode()
