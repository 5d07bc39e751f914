"""Unpack blocks of the quantized formats: convert bytes to integers and scales.

This is the numpy reference for `native/blocks.h` and `native/kernels/portable/unpacked_blocks.h`. Arrays of blocks are
(n, block_bytes) uint8. Layouts: ggml's `ggml-common.h` and `ggml-quants.c`.

Grids (lookup tables of the IQ1, IQ2 and IQ3 formats) are packed as in `native/kernels/portable/grid_codes.h`; a test
compares the two copies. A row of a grid consists of eight 2-bit indices (IQ1, IQ2) or four 4-bit indices (IQ3) into the
format's levels, which are in ascending order. Source: ggml's `ggml-common.h`.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from notso.qtensor.formats import (
    IQ1_M,
    IQ1_S,
    IQ2_S,
    IQ2_XS,
    IQ2_XXS,
    IQ3_S,
    IQ3_XXS,
    IQ4_NL,
    IQ4_XS,
    MXFP4,
    Q2_K,
    Q3_K,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_0,
    Q5_1,
    Q5_K,
    Q6_K,
    Q8_0,
    TQ1_0,
    TQ2_0,
    Format,
)

_LEVELS: dict[str, tuple[int, ...]] = {
    "IQ2_XXS": (8, 25, 43),
    "IQ2_XS": (8, 25, 43),
    "IQ2_S": (8, 25, 43),
    "IQ1_S": (-1, 0, 1),
    "IQ3_XXS": (4, 12, 20, 28, 36, 44, 52, 62),
    "IQ3_S": (1, 3, 5, 7, 9, 11, 13, 15),
}
_ROWS = {"IQ2_XXS": 256, "IQ2_XS": 512, "IQ2_S": 1024, "IQ1_S": 2048, "IQ3_XXS": 256, "IQ3_S": 512}


def grid_codes() -> dict[str, npt.NDArray[np.uint16]]:
    """Return all packed grids: name -> (rows,) uint16."""
    every = np.frombuffer(zlib.decompress(base64.b85decode("".join(_CODES.split()))), "<u2")
    ends = np.cumsum(list(_ROWS.values()))
    return dict(zip(_ROWS, np.split(every, ends[:-1]), strict=True))


def grid(name: str) -> npt.NDArray[np.int32]:
    """Return a grid as int32 (rows, 8), or (rows, 4) for IQ3."""
    bits, width = (4, 4) if name.startswith("IQ3") else (2, 8)
    numbers = grid_codes()[name][:, None].astype(np.int32) >> bits * np.arange(width) & (1 << bits) - 1
    rows: npt.NDArray[np.int32] = np.array(_LEVELS[name], np.int32)[numbers]
    return rows


_CODES = """
c-obkPj{MpyS9OVQAa?4YDQqhs-ygA+9_DDk`Yj#;z+!~J7$#rd-haa;!;QI5|?JAE_E3{<-Y3f+jrm3`%K;s&~_!B*KwTZ&msth5J((JA{4?PJd#23N
D+|{1<{cz;vqiLM!Lud*&ry2qa@0r652x-D1u>F2J2!dj^iXQ;8|S4OLzsZ;~l(*kMS*z5Ev0Bc%n?Sh&C}H5-~C+#d@)A42cu*c$|sn<8oYy>v1zah~
o(<fhCzFO5!9*3Zz8V$sRc-BNCzF6i?|?jcQX_TBQ*t&hU)LXiS?)u?-gCI1WwWDKaIcIw>Sgq*rO<65%mE$t%3axA`t#5Gn$a!7^wT&yraw>tqp87JY
G?i|6_LEUy$%371GIB?(eilB9~{NOh?r^`x<c$h_>yZ8?<D5?QL0oYG?nQQ``(w3Veot63E(qZPbDR-}qrLA0voX<bcy7(XC-T&MK3&g*S`pyNi#*cua
aY)!4CjXIWtRH<sZ>Q^N<Uc>8TU8+CU5zqEgjd}y|37-t;pcj-Lkv7&&w&ixWjdxNVsY7+q9^NB+Y)|Uddq`LgXJMi*_3M3XfDfq=J|@T6u{2(fxk-DX
PLWw=rp%0}v*4H5N?(Pm#2VS8w)z2oMgH;mb4dD>0TEL0D+6UjgB+NM{lBshA_HWC%#bCrI%Oh;CLk9yBqN1hq5_(Qgp^Pft)K>Kp>^~T?LcD2r^FCg9
HTG><1raiFdeh8Ha0qCD268>M>NjjsXu8_Ax{Qw;m)5_{mK*psiFu5k|h%gp%WgY3ytBBt{mj61PMdp*ePMjI0Y%=<Kpj}RpagWDt?Tk2|PhU-a3h40!
i}8d~%*#ost(L6OcZdWXTj{FbgRxkt$gs4bp-<K9QYMCJ_pw2uLMGF_27|QXrjeYDUc|l*Z{8P0|uwhn!*z0a>LO2J$L13M5u%d`K<I;w;HZkX(k-erK
14^jfL@DZfp~@9QbS1RsYKQ#`}-ybNj9A<Ziu6>xzRB*=6Csm^5DnZxg77a-fel5L7h5zSrZ_BkXU&nF?{c7BlG<R1&;LcGWqyTw6qbjo~8N<i*uiT#u
PlB7cZA0$Jv;0A&}SAfZc9G5AXfqRf;Mb=L@v4N|=;V$S>p(MdwU<v`ZK`D%qh6|AuMbY6-W(um}DhanDsV{IZ$+A+`|JT)6l?Gf6r74=OwKN<q2h)ku
^)PTfd0o~OU56_|4cs6N){x+q5K}RaCTigpX$h8O)vb=Twh%jRx9x!~IFHU6E{v(lRlT~bUb>Q7a>E*0|DQ{<>WzB8{tEY&Z9FulaBm#kn-r+QHb5Vr9
>rGd$$Dx${klD(9dA=@rp>pDaD_@+Z@1wV5A9<c?ckkQhlHCnI&KH)^4)f~+g)`Jzb};jeWOFTQYGAlss2+R8N>(Tpf+d^x`V?YHq4CLqrqrCI*icqug
jIj&bT*5CYgypai&AKUIMOHpH*jtXdF!=d2THB3vJ21)L)Plwu-NkD}Gg6tyad`UGL$tu}yqa+_X2VjkJxn!G5t%9{5A%kUy*r2e|p(YyUNWEFLGv<MI
FR{+mea9}HL_JLLHPP~hJg;GiyWAoxRqDH@?`bo*~aD4v*5#<bsD2!RYUZ1W%Kki!dq2=VZn5iU@ofd?m2^zk9kBElE=`nQRGQ6qWc21lfU9U_rG@uN&
=zz~zLi7Jr92bOe+kQjikX2j~mm00YTxmaL}8mq*Nm=&wXIzXB6AI|)u3>QzINK-tqrX1H!UbBHYUfc)ngz?!Q^3Vx3kxB?aAT?1*7zry;2NsQiMHCn?
13W4w_2lwD5-Il&COM=FTxyU3`FLVe|76SsxhA)ND3v^MilfrNsthGk`4h3qlm^r?DVwTN9_0hSx>QIFs0ncF7sV1lF_sqSEU-+a4cekRbdMhYgK8X;K
AAXwqFedIH<PiMD&w6v*JVOxz)YAKvpO*^#wLJ!G|RFnR$#M0z!Iyn71m%aw$66g9y<mm5?q|4fQ&pRa|)+(ZSHttWGs~cPO_;~N&r@tQfjJ_GJu(Nuz
nA?i2*s|X)4X6`Lvu?(t5g;-lXwM@>05V{?POnOF2FbJQexkZ>E~O&HF&s5kKRPzv)T~tRMhmOM)sGf+f_2j?fdvz}qAcH=ikHl#HGkWJbT)8_Onuzic
*@6|z~Na4D;1D_J9JW$W2awwE0PmkBX0QX(VrKxjqO#irN>O5-^)C*@oqHIb+COkU0_c|AYMAM<DdFOY?(kSu13{(mI)<%!w3f1|b|xj^p5A9hF5LRw4
Pe=wYr)4=hJES^|imNnqHDcf=tx{eQI?*iKg@<g7=t3QNiOQ}*8D6c{bGD=pdUh0&3f0&;<QJ*_;Kck3B{zU(>qJaTS#a60{r}*H4t`aH(WdcrEovaX3
6JQ2fW!01_oD5M?RkflTs-@P|C$*#Y)G;^%D--2-nJP17zAT^o(Jt>!4oQGT=n7j&RfI|wd{P3VR4N8orC#Y(#$XmqBeXd9h0%CTK3S%%%{BA^e;^;Ef
7pgQ^|g#H{<cn8*T6icZtGRu(|vGIR}Z1hP4wBxMlmA+Mxwz<DMK)_Co`!=#V`!Zs2d%lXN<vAgc&y}lQDTy25aeN%WR*_6|)jxFWO?Q6gVsk7Ask*Rj
~}qI{B<;jlpP`O@P%Xo3VLYwiR0k!=VoDkWS8#z;RfWsK%j7GF2XIr-1Kj)piwiahC+^A+>ZZtQ}6~i-G&-I$KZGg?bh&sMafW16)|I_v&MCA?6WY+@n
0k<2~6^Jl$)1OAl|54XNQY)~8k)_bH$8d0+MwU-#QS8sNb%b3O!*!8AacvnKk8Ka!8Z<Khu%6<ejJ^*=0{29JurJ!-b?cD3z+Ps8@4Jv;d{0Y0TWEHqu
AlLfPuI%=l^eziKCPOmfWyn<(mZn8^tnXcSby86krv0mc0Z&N)1oLlOty-LsMSzzBzuh$!cfw7PX;~^C?As@=%V?At#qY&-meX?JG{)`NW0X1L-@<18r
gUtXP;zMZ|fT63S+Ne9)oD7`+N7G|=oH}*v(pVi=#>Uth*T)_3_881fOsEMnktfPTpVTJk6rYk)X}SlKW8m`mjG8esekPx+-k!~8XoN>(Bt?s89U=4b+
@GThd_gX93u*DXK$hClT#mu@1el&#Wx)0FN`W4~Ssho>I#^?y<R-JpgY&za!Dh5MY|t&fCAZRcxZQ4%U3zCg1IQmX2Mf#}KPHd-F>}lx2mj`O_Rs!P5d
*Oh2MJELAHe>L!1WvC0Jg_b0;Ny}<<K<reG!$>GOD2_YNIvOLwyuJel$cU=nS2syOZPNSQ2Bw@EI%*mRB(Yb1@%lf#bW_04zVjA`FHJxc-10F$!mJ4i|
A5*KixJ;XXKhf-mtM{KGhSJVvlYint^SghZ&s1K8UjEbzBOxI~?35CQQ>JP{o*ctk9S7h+9pi5;;gUI`|aj>$14rpL^f9jk)Jy;w8WiiNRBY!+LdeEw@
Suwe2GtkYs#jT><%9)Q2Quu(_x2=>D!egKmb2`a%P(ur(BOvnixEN&;fgr8_7CW%>Mo>(S!;Bzb)PbQNrY>fZ0x|%eSZqiEz$#$}v43mT8C>g=_*d!0h
W0E8(k|EPzd6AS!h15x#tdbrH#guH36LLn*!R$K{rEn@nB`A`jDV9o60+po-luA8-(G76A1y*+`m#R|%)uX0VM6IbUMbQk+(IWV~Ol!1B+jNz#(LUXzL
wZ8b=sCTkQ6|PD!0arO0=ElH4$Q8C*(=NgV=xxD-C<m&!34}B(_@Cr7~CE)3uei@Fl%PZ?3h;uV+l6NQY-_W=h!sMvl&)o^K6loSp|Gw2H%@te4BMxm#
wiL>$3sdWLs>T?Lr3#*#SF(CNN=VY{br4D7x&5-LN|r<#1>RF^+}BpW-e#fy;3cSAv$Haux1@GdP=bxGLvz9_Mob_sF%lC$7(pxG5KLTke&kQd~+*$tf
jOPH8DUWv8mC8Z-zm<)@mdRw_(QQnS=9MW*RAo4!m7X)#@bE}^C?X(Mf=?X;72)3tOx9i*Sq!}KIQO-JcPdY#^<U(<<8?lOCsyHqaAm)fO%X<piw)l2W
PdD*%QFDIAt%a>CR`L*d-XdoHrAbDsZDsS*E@A1LutzrN@B!ZQ<;dlH2`UoLV0wbga5xR&XXo4+Ng___AKCHi{5JD%J3rk@qpqV&y6Dq@I_}>jh%@`Rc
<7R?P=hRdtnJBZ$Y@o3mGenlja@llN%qq}S%2_RIX6<Y>Tgx`HVRn+8WtZ7?b_elhML{fxlBkLm(GV@s7G1F+2I8YQ6vyIBjKqcbBCf@)xEEhV0@@6nO
XtL#oYQi4uAcL9tz0kH&y900&~dQS9%W&XX7c%bF|X#0yp<2~?R*y&>L|a0m3n~glPFLHrjRa(g>peFm<7Aw75qZ8&?<zmVdsTqVO!W0kRn!$7n87PGs
S$dSX7Hf(J8vcpxFMsaiij@xG5fr$08w75+{k0CYh2gRi&EbNxsySX3`Sc(H`0nD&ulYPRO*(LO)8$m$D$|<btfq75PCnWDEL{BfD}<4&+DqN$$u!xi6
39sT@H|TEiA5N>qs{aV4=Nm&}q~s+Igwt28XlO1l!Ou+WVPimFtU2gOh<=tK^5qJ|PEkIIwMQTobI87osIf@ZW<UZEXfDxoG-N@buOacWxSRZ%UfvZ_E
sDyy2RpIVZwI%-vQRZsQRKy9imwF{joR0rxrovD#JSC_E5cj`esswlLm1av62oGM?Ig>trBC`;v1SuIzfQ5j{kY?qy~TW*wt@?*JE4$GtRtQ?is<!yOi
CMp#4tjmfB9ZRd|6}wWccoo0Wth6d&Wm1_{=9Oh-S3#j~#k8bGLgQk!lqP6dEvHGEsy%3iW@?sZYmVk>b*-TVT2p({`r1&NY7w-ug|^nV+FpCrxCiB-{
GdJ957md-ga6Qam_6(sP#uT17Sj_tt+V>2F6ddkpi8={S9C+Sps6{!s|Wg{-q(kEq%ZW9zSj5pD~KWvZ7pd~1_OPKgT|INctbRDM&2kIvY|k8D;t`jLw
hr!zuAUkR1Mdt8J^)AfzdQtM%M_9i7_)GV{R;sm9aC925QDk+GNd3Q!uk;$yCh;(=aX5HXYM78)jgJ=GdH?k-0Qq%&m!Aghg2lv_1}cUmBX9XyvV<C0h
!#zp|xS50-xFfVSmWRm-(%mS;6A-wLdz)w0^wz#3T-Yi32(+*(>|YisSSqlH3K#Gxz3?1W81U!<WivNmU@?Mqv*v$kmG?1C*phb%#hRPC}|u{CIuhHcu
GZQG7rwOzYr*KN=C?Z9r@k9Ny`vO9Lq4(*{mvd8wsp4pK-w-@%(UfWxHXYcJ-8*xwvgGL&2;!eV$9L8atl#_ONM{qJu))Aqp=AD8gJE~K5DvstnIJ#pv
reis_<2Y5vb!v|1_)g%ooURi(eP`edoslzfBIm`~I6G(W9Gq7Nhpro|CaPqWt){9%wOCcFmFh#)s9IIK>Qt*$w_2|@s(v-7cB{kcxH_#y)kSq(eT7Dhx
rCc^DVK3smvhsu=*q6*s&3iUT-`NX)3sdNb=<1!x;58xeK&BMZp-bsp*wUZ?#zwcxw~+e?#{()@fusZtnoFmma7$NYOPY!YDUejIkjrdtu<;v?XmV$>(
oZIX)UVFYm3@TZCxYkOr5Kz>tbE0>vg;C)T{Mc-K+ccX1!JK)aUhG9rbW8<|RDZV?DvkcsZ}&sh;K;p6xlF>jhrZd-8hT$eVhRxAyklt4B4sMjCp$+$c
9}XzSHRy%9Dhjd^3&pnTeAea^r11wZE(e915Qs$cORe8abV+jo4|ulaSq;Rk-t5B;G(_NV^LkNmm6@L&A3zx7{zB8UgcfC|`v3(|oSs6jc<0zEJSE3gA
6a04&!gCJ-It)L$agHbREqF^2@gO^|v?1Fu82(V_N$u{|Bu9<HZno?73R+<k@qiHqmrqir8Yt4EyXg)UE&2BSnj$lp9n~UbMxoU2k`{uF9J*FSUNBPlw
v>$7a-ec=Ae4N12*gv8zyhXOyme9(!a;-v3YRN6NRc=*UM$2m1EvMzS>aC#l)atf+tx+p#ty|mHuJziYp17yfll-JSX;1o-{ZxIbJ^4?;Q|qb!G<#Y+y
*%wt3nt!9!gk5D^X+0=h4o^zt+vy4+rjBQaL^vLqxP!3IlT-L9je20xK6qwcI1xI(K>p^?ARTrQ|-7NztilrI$>wnnRVu!WoHMQ2J6OQ)v#T@o9X7e#j
eq{x^6c(y(kX4qi)n)bvNBZ_t<56>7LwEVBOfgTF>kGy;g75TlUZ}5z-+WUWU1_5K6Fd)UXm7p%vPp6S`q748msk7(Ruauow2jVK@$_VH7UHeMt4We!4
IA<-XF_`VW1*Z};7Pt?%`l{ilA|pY&h)TUbcgAU;SA*a1Jt4Dy2_Y$bJI46K1W2nMawo919J8bpH??5D%vI3R|xAvI)%+)y0KLuFVVYD0Z!4((xW=neg
0IGhic!`%=WVWapcIbuirC^O2BiX(MojI5C}YQypxj7Fnqw1Ne87#&B%m>P4iztUrIERV}$ZETOL<J!12ej114$#^!NkC)@!7@gpg*d#F_C+s9Oxts`-
>?AiSOr(hl%gmTq6MN!J+(}~+OnQ_4WIBl^i^+Pjo$M#C6JknDnQ3||PL*kSs!jE&Ikl(NX>;0|hSS+}K7E~{Gkg}Cku!Fdn&oEF>|tiiteHJ?X4RQHt
IxbyV;0PMv;J&4o6VxxVz!>W&X9<R;!zSd9~ChX8*x!O5+X4wM8!yslt_)rkrwHZ5t)${*^v`fBR8r=UgSqX)QnnDCkmrMG>N9sEQ+Few2WS&RkVqA(I
GlU=p3Jub9SDd^Yh%iFjwc5xi&ZE=G>k;b9WxhALre9Z$6xl=F|CX9?iG&{rq)KEVxB_Aui-ad7&@Ng}rbVwS~V37U5#Dm@k%#-2z|6mWd^~q?hb6wY*
&NOJSK^=9bd3v{aXs<-^igT1$KBEZt>e87!O2r)6i^TaK60Wwd-*u9y2I@xs1{FUm{#MSIa-?3e0`_Y%HLUS==R%lyxqHoM|s>*itYsw-n<t(=v+YOlJ
h!D_UMRx4P)2iU*FI<cnK%$i%L*O%+^T3Z`ydtF`E*52A*hwJfrx}L9>>tAo;$ql(l|6a=K#@IL;cN1*dzgKg#S#373osXOJR@};4Wvg$kt-Y;oYg=y{
Y@6H1ZEG8DW4pwT+|fIBm)hlag<WZ<?u?zavv<zU-37a+U1!(Zg}eT4xSQ^x-2%oZwdeMidtoo`m3?{tus8Si-q~08^?hUC-;ejve!gGs*Zb{$zef((A
%6HjFZRWQaj*`~!9BDO-NWE8Iz)#REcwIXcpzSx*YvCKD!$6E`m6m~d-YzMudUbd>--ftV#oix^ovL1XdRtn``CrmKRQOo)p2t?{NDdKZ2t@7&1wDLAS
L8G@)JSPv(tON01N*by@i!;q0gr^k7Lwn%imyk*az71U$CDTdUk$Bp3!IG+4I>2{sC9;FZg%-CoJ}J;+8Op`<Ndi&zW=X{NuTIj*@4mH*JBuBCp9?@*V
jJw(hU@YU=bxjnZc{Nz=4IU(?@c<N~|kFK#Z%7tITlAsC(E*(|KcuPni3-binLEh>t?IPIw%f5Vq}R5%le(;KcJTnm2*e+$p2Z-1%Go6|P>kdZQW2E8J
$n5*ZjA6NI;&)GBattg8>MD*?1Tkfs;7QH5~>1*No>RP`JuD@L)H`on-b91BIlyA`6vs?03yftsX-BNdVch~Pez5DhKxsTmv?(KW#{rmTSy}$cV|A0$x
q<iUu^jZ2M{gC<6hmusPmzt&XkLpJp7J#pa>PPiiB|ed#=ug+5XkFHyb;O84Bef02yfwd>*yqomN$bjbYkjjY`v%Hw_DktY7P><j8iU|@-kXNsxc=+?U
kdoy4DOm|e+z$~JrmF8&*by%v-zC+Dt)EDso%_R$anVp-S_%;;fMSK`HB6^{=EJdf}p1tpmPL10E9k$2gD-+A|iK)1X)m#Pl$nhM(Rid`HK8N{tNy9ie
jh#3qYYP%A;54Tl5CKM-|jV1N0mGbtpz)=NO4yU>qi3B6f|v!%CQneS)-n#-6e7*x4C%#-8zKnX{X-yR-La%9(y<p8b9H_3Y;vf?wcoPT%s};u8K5H}G
d1BXEKzGDMEJBV+=8VMLSoPQ+qV>>_p(Gh<(4$T@b7pY!LL^W6E}xqfcJ4}_A~>3<VY<ORu+Z%CfZkT;OF_or`8Jn|d-$S8G2#VC?uD1o}B?kM^6t;jR
=FZgB9G)upsc{)qq(h~iVw&^<L5xu}K&M(M|iwoi6?Zx%Qy9@cEaq)a{2HB(;hPh$xm=aTloLUUZlI#U5u-EJ@Yp^_*<=%1%SLV<+XK%<i^c&&L{TumB
<IOXq80F7+f<Na;o<4m?A@EoHTmG8A<z@aOub#fA_?v&`zw<xg1HvHR7s4AMBZ$I{@J=WRhJa@9%y~x0TxG5y<8tP6=1b;l=0^s(!mfxb>MC=Uy}G%&y
DDAjSIsLld!FU9SJ~U_eOAtX%l^#bA|+<T53uz=i_apG!*b_20XDpsBi>SPb8oNTetfIH#jdIAi);4!&2{Gb=KAjX{<?InTz|SYuK&9JdX3(k-4Hj-jc
{{yBi+<*zTN!m2Dzng`P<vucena2dPm+dcf#G(-P^nCJNfS8-KRVI?)%-@JL(<xF7xi@o%yc*&VPsAllSz!cz=7Z+&lN*@45H#d-TKE2mV9m!~F+D!X;
YbrL6Q;x|L)}m!2g|K9?!^Le9w7^1b{K_PQ;jrLz)QVoO5l4sP#DsZn|^;UB4w7a#eLnU6Og??3+f_9Cl%P$cE6La67epf=Qt^1E`qOnzeFCO>{MK4Ch
kGkOL#rlNn+O}(lA&{5;eAPm|Nj9cTIftZweWnP=_&ChVL=by>XZ$B%ajnBd7@1K9Y^Yhj%>^d6umtlXlOAhu0|C0Ga)i3I7{ic3buh$We_uhKGM>pOz
O3>dMjpqjP7xS0!m-LtDe}ra^1ZTm!pdJv=nyJ4p{zjg0xN-hD^Zfo<dbXY$&)8S$Yxe8Muj*Iy8~%;_#(fjMU4JvaVc&1R-+%x79sNQ4xcI^U(0^opm
VRRYy7?FKU;hoy-KH!
"""

Bytes: TypeAlias = npt.NDArray[np.uint8]
Floats: TypeAlias = npt.NDArray[np.float32]
Integers: TypeAlias = npt.NDArray[Any]

LEVELS_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int32)
# The values of the 4-bit floats (E2M1), doubled to make them integers.
LEVELS_MXFP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int32)


class Unpacked256(NamedTuple):
    """256-value block: value = d * scales[j] * q - dmin * mins[j]; j: the group of 16 values (Q4_K, Q5_K: 32)."""

    d: Floats  # (n,): the file's d, divided by a power of two where scales or q would otherwise be fractions
    dmin: Floats  # (n,); zero except in Q2_K, Q4_K and Q5_K
    scales: Integers  # (n, groups) int32
    mins: Integers  # (n, groups) int32
    q: Integers  # (n, 256) int32, -128..127


class Unpacked32(NamedTuple):
    """32-value block: value = d * q + m."""

    d: Floats  # (n,)
    m: Floats  # (n,); zero except in Q4_1 and Q5_1
    q: Integers  # (n, 32) int32


def read_half(b: Bytes, start: int) -> Floats:
    """Return each block's float16 number at byte `start`."""
    return np.ascontiguousarray(b[:, start : start + 2]).view("<f2")[:, 0].astype(np.float32)


def _read_words(b: Bytes, start: int, count: int, kind: str) -> Integers:
    size = np.dtype(kind).itemsize
    return np.ascontiguousarray(b[:, start : start + size * count]).view(kind).astype(np.int64)


def _zero_minimum(b: Bytes) -> Floats:
    return np.zeros(len(b), np.float32)


def _without_minimum(d: Floats, scales: Integers, q: Integers) -> Unpacked256:
    n = len(d)
    return Unpacked256(
        d, np.zeros(n, np.float32), scales.reshape(n, 16), np.zeros((n, 16), np.int32), q.reshape(n, 256)
    )


def _unpack_nibbles(qs: Bytes, width: int = 16) -> Integers:
    # (n, k) -> (n, 2 * k): for every `width` bytes, first their low nibbles, then their high nibbles.
    runs = qs.reshape(len(qs), -1, 1, width).astype(np.int32)
    return np.concatenate([runs & 15, runs >> 4], axis=2).reshape(len(qs), -1)


def _unpack_pairs(qs: Bytes) -> Integers:
    # (n, 64) -> (n, 256): for every 32 bytes, first the lowest two bits of each byte, then the next two, and so on.
    return (qs.reshape(-1, 2, 1, 32).astype(np.int32) >> 2 * np.arange(4)[:, None] & 3).reshape(len(qs), 256)


def _nibble_pairs(b: Bytes) -> Integers:
    # (n, k) -> (n, 2 * k): for each byte, its low nibble, then its high nibble.
    return np.stack([b & 15, b >> 4], axis=2).reshape(len(b), -1).astype(np.int32)


def _signs(bits: Integers) -> Integers:
    # (n, k) -> (n, k, 8): for each byte, 1 for a zero bit and -1 for a one bit, lowest bit first.
    return 1 - 2 * (bits[:, :, None] >> np.arange(8) & 1)


def _restore_parity_bit(seven: Integers) -> Integers:
    # Only seven of eight sign bits are stored. The eighth is chosen so that the number of set bits is even.
    parity: Integers = seven
    for shift in (4, 2, 1):
        parity = parity ^ parity >> shift
    eight: Integers = seven | (parity & 1) << 7
    return eight


def _fifth_bits(b: Bytes, start: int) -> Integers:
    return (_read_words(b, start, 1, "<u4") >> np.arange(32) & 1).astype(np.int32) << 4


def _int8(b: Bytes) -> Integers:
    return np.ascontiguousarray(b).view(np.int8).astype(np.int32)


def _q4_0(b: Bytes) -> Unpacked32:
    return Unpacked32(read_half(b, 0), _zero_minimum(b), _unpack_nibbles(b[:, 2:]) - 8)


def _q4_1(b: Bytes) -> Unpacked32:
    return Unpacked32(read_half(b, 0), read_half(b, 2), _unpack_nibbles(b[:, 4:]))


def _q8_0(b: Bytes) -> Unpacked32:
    return Unpacked32(read_half(b, 0), _zero_minimum(b), _int8(b[:, 2:]))


def _q5_0(b: Bytes) -> Unpacked32:
    return Unpacked32(read_half(b, 0), _zero_minimum(b), (_unpack_nibbles(b[:, 6:]) | _fifth_bits(b, 2)) - 16)


def _q5_1(b: Bytes) -> Unpacked32:
    return Unpacked32(read_half(b, 0), read_half(b, 2), _unpack_nibbles(b[:, 8:]) | _fifth_bits(b, 4))


def _iq4_nl(b: Bytes) -> Unpacked32:
    return Unpacked32(read_half(b, 0), _zero_minimum(b), LEVELS_IQ4[_unpack_nibbles(b[:, 2:])])


def _mxfp4(b: Bytes) -> Unpacked32:
    d = np.ldexp(np.float32(1), b[:, 0].astype(np.int32) - 128).astype(np.float32)
    return Unpacked32(d, _zero_minimum(b), LEVELS_MXFP4[_unpack_nibbles(b[:, 1:])])


def _q2_k(b: Bytes) -> Unpacked256:
    scales = b[:, :16].astype(np.int32)
    return Unpacked256(read_half(b, 80), read_half(b, 82), scales & 15, scales >> 4, _unpack_pairs(b[:, 16:80]))


def _q3_k(b: Bytes) -> Unpacked256:
    high = (b[:, None, :32].astype(np.int32) >> np.arange(8)[:, None] & 1).reshape(len(b), 256)
    s = b[:, 96:108].astype(np.int32)
    low = np.concatenate([s[:, :8] & 15, s[:, :8] >> 4], axis=1)
    top = (s[:, None, 8:] >> 2 * np.arange(4)[:, None] & 3).reshape(len(b), 16)
    return _without_minimum(read_half(b, 108), (low | top << 4) - 32, _unpack_pairs(b[:, 32:96]) + 4 * high - 4)


def _scales_and_mins(b: Bytes) -> tuple[Integers, Integers]:
    # Scales and mins have six bits. The first four scales are the low six bits of bytes 0 to 3, and the first four mins
    # are the low six bits of bytes 4 to 7. The others are split. Their lower four bits are in bytes 8 to 11: the low
    # nibbles for scales, the high nibbles for mins. Their upper two bits are the top two bits of bytes 0 to 3 for
    # scales, and of bytes 4 to 7 for mins.
    first, second, third = (b[:, start : start + 4].astype(np.int32) for start in (4, 8, 12))
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6) << 4], axis=1)
    return scales, np.concatenate([second & 63, (third >> 4) | (second >> 6) << 4], axis=1)


def _q4_k(b: Bytes) -> Unpacked256:
    return Unpacked256(read_half(b, 0), read_half(b, 2), *_scales_and_mins(b), _unpack_nibbles(b[:, 16:], 32))


def _q5_k(b: Bytes) -> Unpacked256:
    # Bit j of byte 16 + l is the fifth bit of value l in run j (a run has 32 values).
    bits = (b[:, None, 16:48].astype(np.int32) >> np.arange(8)[:, None] & 1).reshape(len(b), 256)
    q = _unpack_nibbles(b[:, 48:], 32) + 16 * bits
    return Unpacked256(read_half(b, 0), read_half(b, 2), *_scales_and_mins(b), q)


def _q6_k(b: Bytes) -> Unpacked256:
    # Each half of a block (128 values) takes 64 bytes of nibbles and 32 bytes of bit pairs.
    q = (_unpack_nibbles(b[:, :128], 64) | _unpack_pairs(b[:, 128:192]) << 4) - 32
    return _without_minimum(read_half(b, 208), _int8(b[:, 192:208]), q)


def _iq4_xs(b: Bytes) -> Unpacked256:
    high = _read_words(b, 2, 1, "<u2") >> 2 * np.arange(8) & 3
    scales = (_nibble_pairs(b[:, 4:8]) | high << 4) - 32
    return _without_minimum(read_half(b, 0), np.repeat(scales, 2, axis=1), LEVELS_IQ4[_unpack_nibbles(b[:, 8:])])


def _unpack_sign_groups(words: Integers) -> Integers:
    # (n, 8) words, each with four groups of seven sign bits -> signs (n, 32, 8).
    return _signs(_restore_parity_bit(words[:, :, None] >> 7 * np.arange(4) & 127).reshape(len(words), 32))


def _iq2_xxs(b: Bytes) -> Unpacked256:
    words = _read_words(b, 2, 16, "<u4").reshape(-1, 8, 2)
    rows = grid("IQ2_XXS")[(words[:, :, :1] >> 8 * np.arange(4) & 255).reshape(len(b), 32)]
    scales = np.repeat(2 * (words[:, :, 1] >> 28) + 1, 2, axis=1)
    return _without_minimum(read_half(b, 0) / np.float32(8), scales, rows * _unpack_sign_groups(words[:, :, 1]))


def _iq2_xs(b: Bytes) -> Unpacked256:
    words = _read_words(b, 2, 32, "<u2")
    rows = grid("IQ2_XS")[words & 511]
    return _without_minimum(
        read_half(b, 0) / np.float32(8),
        2 * _nibble_pairs(b[:, 66:74]) + 1,
        rows * _signs(_restore_parity_bit(words >> 9)),
    )


def _iq2_s(b: Bytes) -> Unpacked256:
    high = (b[:, 66:74, None].astype(np.int64) >> 2 * np.arange(4) & 3).reshape(len(b), 32)
    rows = grid("IQ2_S")[b[:, 2:34] | high << 8]
    return _without_minimum(
        read_half(b, 0) / np.float32(8),
        2 * _nibble_pairs(b[:, 74:82]) + 1,
        rows * _signs(b[:, 34:66].astype(np.int64)),
    )


def _iq3_xxs(b: Bytes) -> Unpacked256:
    words = _read_words(b, 66, 8, "<u4")
    rows = grid("IQ3_XXS")[b[:, 2:66]].reshape(len(b), 32, 8)
    scales = np.repeat(2 * (words >> 28) + 1, 2, axis=1)
    return _without_minimum(read_half(b, 0) / np.float32(4), scales, rows * _unpack_sign_groups(words))


def _iq3_s(b: Bytes) -> Unpacked256:
    high = (b[:, 66:74, None].astype(np.int64) >> np.arange(8) & 1).reshape(len(b), 64)
    rows = grid("IQ3_S")[b[:, 2:66] | high << 8].reshape(len(b), 32, 8)
    scales = np.repeat(2 * _nibble_pairs(b[:, 106:110]) + 1, 2, axis=1)
    return _without_minimum(read_half(b, 0), scales, rows * _signs(b[:, 74:106].astype(np.int64)))


def _iq1_s(b: Bytes) -> Unpacked256:
    words = _read_words(b, 34, 8, "<u2")
    high = (words[:, :, None] >> 3 * np.arange(4) & 7).reshape(len(b), 32)
    shift = np.where(words & 0x8000, -1, 1).repeat(4, axis=1)
    scales = np.repeat(2 * (words >> 12 & 7) + 1, 2, axis=1)
    return _without_minimum(
        read_half(b, 0) / np.float32(8), scales, 8 * grid("IQ1_S")[b[:, 2:34] | high << 8] + shift[:, :, None]
    )


def _iq1_m(b: Bytes) -> Unpacked256:
    high = _nibble_pairs(b[:, 32:48])
    words = _read_words(b, 48, 4, "<u2")
    half = (words >> 12 << 4 * np.arange(4)).sum(axis=1).astype("<u2").view("<f2").astype(np.float32)
    shift = np.where(high & 8, -1, 1)
    scales = 2 * (words[:, :, None] >> 3 * np.arange(4) & 7) + 1
    return _without_minimum(
        half / np.float32(8), scales, 8 * grid("IQ1_S")[b[:, :32] | (high & 7) << 8] + shift[:, :, None]
    )


def _trits(b: Bytes, digits: int) -> Integers:
    # (n, k) -> (n, digits * k) of -1, 0 and 1: the first base-3 digit of every byte, then the second, ...
    powered = b[:, None, :] * (3 ** np.arange(digits)).astype(np.uint8)[:, None]
    return (powered.astype(np.int32) * 3 >> 8).reshape(len(b), -1) - 1


def _tq1_0(b: Bytes) -> Unpacked256:
    q = np.concatenate([_trits(b[:, :32], 5), _trits(b[:, 32:48], 5), _trits(b[:, 48:52], 4)], axis=1)
    return _without_minimum(read_half(b, 52), np.ones((len(b), 16), np.int32), q)


def _tq2_0(b: Bytes) -> Unpacked256:
    return _without_minimum(read_half(b, 64), np.ones((len(b), 16), np.int32), _unpack_pairs(b[:, :64]) - 1)


UNPACK_256: dict[Format, Callable[[Bytes], Unpacked256]] = {
    Q2_K: _q2_k,
    Q3_K: _q3_k,
    Q4_K: _q4_k,
    Q5_K: _q5_k,
    Q6_K: _q6_k,
    IQ4_XS: _iq4_xs,
    IQ2_XXS: _iq2_xxs,
    IQ2_XS: _iq2_xs,
    IQ2_S: _iq2_s,
    IQ3_XXS: _iq3_xxs,
    IQ3_S: _iq3_s,
    IQ1_S: _iq1_s,
    IQ1_M: _iq1_m,
    TQ1_0: _tq1_0,
    TQ2_0: _tq2_0,
}

UNPACK_32: dict[Format, Callable[[Bytes], Unpacked32]] = {
    Q4_0: _q4_0,
    Q4_1: _q4_1,
    Q8_0: _q8_0,
    Q5_0: _q5_0,
    Q5_1: _q5_1,
    IQ4_NL: _iq4_nl,
    MXFP4: _mxfp4,
}


def dequantize_blocks(format: Format, b: Bytes) -> Floats:
    """Return the dequantized values as float32, rounded after every operation."""
    if format in UNPACK_32:
        small = UNPACK_32[format](b)
        numbers: Floats = small.d[:, None] * small.q.astype(np.float32)
        # Adding m replaces -0 with 0 even if m is zero.
        return numbers + small.m[:, None] if format in (Q4_0, Q4_1, Q5_1, Q8_0) else numbers
    w = UNPACK_256[format](b)
    scale = w.d[:, None] * w.scales.astype(np.float32)
    minimum = w.dmin[:, None] * w.mins.astype(np.float32)
    q = w.q.reshape(*scale.shape, -1).astype(np.float32)
    return (scale[:, :, None] * q - minimum[:, :, None]).reshape(-1, 256)
