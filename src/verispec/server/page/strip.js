// The last passes of this page, of all answers: bars as high as they committed tokens, a colour for each answer.

const MOST = 200;
const passes = [];
let answers = 0;

export function beginAnswer() { answers += 1; }

export function addPass(canvas, numTokens) {
  passes.push({ numTokens, answer: answers });
  passes.splice(0, passes.length - MOST);
  const pen = canvas.getContext("2d");
  pen.clearRect(0, 0, canvas.width, canvas.height);
  passes.forEach((pass, i) => {
    const height = Math.min(canvas.height, 3 + 3 * pass.numTokens);
    pen.fillStyle = `hsl(${(205 + 137 * pass.answer) % 360} 60% 50%)`;
    pen.fillRect(i * 4, canvas.height - height, 3, height);
  });
  const shown = new Set(passes.map((pass) => pass.answer)).size;
  const total = passes.reduce((sum, pass) => sum + pass.numTokens, 0);
  canvas.setAttribute("aria-label", `The last ${passes.length} passes, of ${shown} ${shown === 1 ? "answer" : "answers"}: ${total} tokens`);
}
